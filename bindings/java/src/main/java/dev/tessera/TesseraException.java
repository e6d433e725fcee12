package dev.tessera;

import java.util.Locale;

/**
 * An error of the native library. The message states what failed, with which value, on which rank, and what to do;
 * causes are in {@link #getCause()}. The common kinds have their own subclasses; {@link #code()} distinguishes all
 * kinds.
 */
public class TesseraException extends RuntimeException {
    private static final long serialVersionUID = 1;

    /** Where a native code comes from. */
    public enum NativeDomain {
        /** There is none. */
        NONE,
        /** The operating system's errno. */
        ERRNO,
        /** A CUDA result. */
        CUDA,
        /** An NCCL result. */
        NCCL,
        /** A callback's value. */
        USER
    }

    /** The fields of a native error. */
    static final class Details {
        int status;
        String message;
        int rank;
        int peer;
        String operation;
        long sequence;
        int nativeCode;
        NativeDomain nativeDomain;
        boolean retriable;
        TesseraException cause;
    }

    private final ErrorCode code;
    private final int rank;
    private final int peer;
    private final String operation;
    private final long sequence;
    private final int nativeCode;
    private final NativeDomain nativeDomain;
    private final boolean retriable;

    TesseraException(Details details) {
        super(details.message); // without a cause, so that one which is Java's own may be set later
        if (details.cause != null) {
            initCause(details.cause);
        }
        code = ErrorCode.of(details.status);
        rank = details.rank;
        peer = details.peer;
        operation = details.operation;
        sequence = details.sequence;
        nativeCode = details.nativeCode;
        nativeDomain = details.nativeDomain;
        retriable = details.retriable;
    }

    /** Called by the shims, on the thread whose call failed. */
    static TesseraException of(int status, byte[] message, int rank, int peer, byte[] operation, long sequence,
            int nativeCode, int nativeDomain, boolean retriable, TesseraException cause) {
        final Details details = new Details();
        details.status = status;
        details.message = Native.text(message);
        details.rank = rank;
        details.peer = peer;
        details.operation = Native.text(operation);
        details.sequence = sequence;
        details.nativeCode = nativeCode;
        details.nativeDomain = nativeDomain >= 0 && nativeDomain < NativeDomain.values().length
                ? NativeDomain.values()[nativeDomain] : NativeDomain.NONE;
        details.retriable = retriable;
        details.cause = cause;
        switch (ErrorCode.of(status)) {
            case TIMEOUT:
                return new TesseraTimeoutException(details);
            case ABORTED:
                return new TesseraAbortedException(details);
            case PEER_LOST:
                return new TesseraPeerLostException(details);
            case MISMATCH:
                return new TesseraMismatchException(details);
            case INTERRUPTED:
                return new TesseraInterruptedException(details);
            case INVALID_ARGUMENT:
                return new TesseraInvalidArgumentException(details);
            case INVALID_STATE:
                return new TesseraInvalidStateException(details);
            case IO:
                return new TesseraIoException(details);
            case CORRUPT:
                return new TesseraCorruptException(details);
            case NOT_FOUND:
                return new TesseraNotFoundException(details);
            case PERMISSION:
                return new TesseraPermissionException(details);
            default:
                return new TesseraException(details);
        }
    }

    /**
     * The kind of error.
     *
     * @return the code
     */
    public ErrorCode code() {
        return code;
    }

    /**
     * The rank on which the error occurred.
     *
     * @return a rank of the communicator concerned, or -1
     */
    public int rank() {
        return rank;
    }

    /**
     * The rank that the error is about: the dead, late or differing one.
     *
     * @return a rank of the communicator concerned, or -1
     */
    public int peer() {
        return peer;
    }

    /**
     * The operation that failed.
     *
     * @return "all_reduce", "save", or ""
     */
    public String operation() {
        return operation;
    }

    /**
     * The sequence number of the collective that failed.
     *
     * @return counted from 1 per communicator, separately for sends and receives, or -1
     */
    public long sequence() {
        return sequence;
    }

    /**
     * The underlying code: errno, a CUDA or NCCL result, or a callback's value.
     *
     * @return the code, or 0
     */
    public int nativeCode() {
        return nativeCode;
    }

    /**
     * Where {@link #nativeCode()} comes from.
     *
     * @return its domain
     */
    public NativeDomain nativeDomain() {
        return nativeDomain;
    }

    /**
     * Whether the same call may succeed if repeated without rebuilding anything.
     *
     * @return true if so
     */
    public boolean isRetriable() {
        return retriable;
    }

    /** The class, the code if the class does not imply it, and the message. */
    @Override
    public String toString() {
        final String kind = getClass() == TesseraException.class
                ? getClass().getName() + " [" + code.name().toLowerCase(Locale.ROOT) + "]" : getClass().getName();
        return kind + ": " + getMessage();
    }
}
