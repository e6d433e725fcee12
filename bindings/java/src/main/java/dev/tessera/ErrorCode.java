package dev.tessera;

/** The kind of an error: the native library's status codes. */
public enum ErrorCode {
    /** An argument has an invalid value. */
    INVALID_ARGUMENT(1),
    /** The call is not valid in the current state. */
    INVALID_STATE(2),
    /** A deadline passed; the message names the ranks that were waited for. */
    TIMEOUT(3),
    /** The communicator failed earlier; the cause is the reason. */
    ABORTED(4),
    /** A rank died. */
    PEER_LOST(5),
    /** The ranks, or a checkpoint and a state, differ. */
    MISMATCH(6),
    /** An operating system call failed; the native code is errno. */
    IO(7),
    /** Data fails its checksum or its format. */
    CORRUPT(8),
    /** It does not exist. */
    NOT_FOUND(9),
    /** A wait expired; the operation continues. */
    NOT_READY(10),
    /** The thread was interrupted. */
    INTERRUPTED(11),
    /** A rank was lost after the votes of a save; the save is committed if its manifest exists. */
    COMMIT_UNKNOWN(12),
    /** No native memory. */
    NO_MEMORY(13),
    /** Not supported by this build or on this machine. */
    UNSUPPORTED(14),
    /** The library, binding or format has another version. */
    VERSION(15),
    /** The job token is wrong or missing, or access was denied. */
    PERMISSION(16),
    /** CUDA failed. */
    CUDA(17),
    /** NCCL failed. */
    NCCL(18),
    /** A callback failed. */
    USER(19),
    /** A bug in Tessera. */
    INTERNAL(20),
    /** A code that is unknown to this binding. */
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
