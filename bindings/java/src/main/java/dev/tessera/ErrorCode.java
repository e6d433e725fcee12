package dev.tessera;

/** What kind of error it is; the native library's codes. */
public enum ErrorCode {
    /** A value that the call cannot take. */
    INVALID_ARGUMENT(1),
    /** Right value, wrong moment. */
    INVALID_STATE(2),
    /** A deadline passed; the message names who was awaited. */
    TIMEOUT(3),
    /** The communicator failed before; the cause says how. */
    ABORTED(4),
    /** A rank died. */
    PEER_LOST(5),
    /** Ranks disagree on what they are doing, or a checkpoint on what it holds. */
    MISMATCH(6),
    /** The operating system refused; the native code is errno. */
    IO(7),
    /** Data fails its checksum or its format. */
    CORRUPT(8),
    /** There is no such thing. */
    NOT_FOUND(9),
    /** A wait expired, the work lives on. */
    NOT_READY(10),
    /** The thread was interrupted. */
    INTERRUPTED(11),
    /** A rank was lost after the votes of a save: the manifest's presence decides whether it exists. */
    COMMIT_UNKNOWN(12),
    /** No native memory. */
    NO_MEMORY(13),
    /** Not supported by this build or on this machine. */
    UNSUPPORTED(14),
    /** Library, binding or format of another version. */
    VERSION(15),
    /** Wrong or missing job token, or access denied. */
    PERMISSION(16),
    /** CUDA failed. */
    CUDA(17),
    /** NCCL failed. */
    NCCL(18),
    /** A callback failed. */
    USER(19),
    /** A defect of Tessera. */
    INTERNAL(20),
    /** A code that this binding does not know. */
    UNKNOWN(-1);

    private final int number;

    ErrorCode(int number) {
        this.number = number;
    }

    /**
     * The native library's number.
     *
     * @return a positive number; -1 for {@link #UNKNOWN}
     */
    public int number() {
        return number;
    }

    static ErrorCode of(int number) {
        for (ErrorCode code : values()) {
            if (code.number == number) {
                return code;
            }
        }
        return UNKNOWN;
    }
}
