package dev.tessera;

/** There is no such key, name or checkpoint. */
public final class TesseraNotFoundException extends TesseraException {
    private static final long serialVersionUID = 1;

    TesseraNotFoundException(Details details) {
        super(details);
    }
}
