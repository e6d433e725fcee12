package dev.tessera;

/** The call is not valid in the current state. */
public final class TesseraInvalidStateException extends TesseraException {
    private static final long serialVersionUID = 1;

    TesseraInvalidStateException(Details details) {
        super(details);
    }
}
