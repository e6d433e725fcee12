package dev.tessera;

/** Data fails its checksum or its format. */
public final class TesseraCorruptException extends TesseraException {
    private static final long serialVersionUID = 1;

    TesseraCorruptException(Details details) {
        super(details);
    }
}
