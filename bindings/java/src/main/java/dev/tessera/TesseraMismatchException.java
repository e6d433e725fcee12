package dev.tessera;

/** Ranks disagree on what they are doing, or a checkpoint and a state on what they hold. */
public final class TesseraMismatchException extends TesseraException {
    private static final long serialVersionUID = 1;

    TesseraMismatchException(Details details) {
        super(details);
    }
}
