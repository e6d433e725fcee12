package dev.tessera;

/** A rank died; {@link #peer()} is its number. */
public final class TesseraPeerLostException extends TesseraException {
    private static final long serialVersionUID = 1;

    TesseraPeerLostException(Details details) {
        super(details);
    }
}
