package dev.tessera;

/** An argument has an invalid value. */
public final class TesseraInvalidArgumentException extends TesseraException {
    private static final long serialVersionUID = 1;

    TesseraInvalidArgumentException(Details details) {
        super(details);
    }
}
