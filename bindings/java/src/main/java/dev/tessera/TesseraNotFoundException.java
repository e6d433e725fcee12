package dev.tessera;

/** The key, name or checkpoint does not exist. */
public final class TesseraNotFoundException extends TesseraException {
    private static final long serialVersionUID = 1;

    TesseraNotFoundException(Details details) {
        super(details);
    }
}
