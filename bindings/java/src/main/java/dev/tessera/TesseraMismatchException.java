package dev.tessera;

/** The ranks, or a checkpoint and a state, differ. */
public final class TesseraMismatchException extends TesseraException {
    private static final long serialVersionUID = 1;

    TesseraMismatchException(Details details) {
        super(details);
    }
}
