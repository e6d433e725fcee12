package dev.tessera;

/** The library cannot take a value. */
public final class TesseraInvalidArgumentException extends TesseraException {
    private static final long serialVersionUID = 1;

    TesseraInvalidArgumentException(Details details) {
        super(details);
    }
}
