package dev.tessera;

/** The communicator failed before, or was aborted; the cause says how. */
public final class TesseraAbortedException extends TesseraException {
    private static final long serialVersionUID = 1;

    TesseraAbortedException(Details details) {
        super(details);
    }
}
