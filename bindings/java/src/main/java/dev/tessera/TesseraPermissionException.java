package dev.tessera;

/** The job token is wrong or missing, or access was denied. */
public final class TesseraPermissionException extends TesseraException {
    private static final long serialVersionUID = 1;

    TesseraPermissionException(Details details) {
        super(details);
    }
}
