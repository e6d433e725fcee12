package dev.tessera;

/** The waiting thread was interrupted; its interrupted status is still set. */
public final class TesseraInterruptedException extends TesseraException {
    private static final long serialVersionUID = 1;

    TesseraInterruptedException(Details details) {
        super(details);
    }
}
