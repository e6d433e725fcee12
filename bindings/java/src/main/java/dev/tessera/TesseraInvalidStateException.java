package dev.tessera;

/** Right value, wrong moment. */
public final class TesseraInvalidStateException extends TesseraException {
    private static final long serialVersionUID = 1;

    TesseraInvalidStateException(Details details) {
        super(details);
    }
}
