package dev.tessera;

/** An operating system call failed; {@link #nativeCode()} is its errno. */
public final class TesseraIoException extends TesseraException {
    private static final long serialVersionUID = 1;

    TesseraIoException(Details details) {
        super(details);
    }
}
