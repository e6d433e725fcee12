package dev.tessera;

/** The communicator failed earlier, or was aborted; the cause is the reason. */
public final class TesseraAbortedException extends TesseraException {
    private static final long serialVersionUID = 1;

    TesseraAbortedException(Details details) {
        super(details);
    }
}
