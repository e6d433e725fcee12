package dev.tessera;

/** Wrong or missing job token, or access denied. */
public final class TesseraPermissionException extends TesseraException {
    private static final long serialVersionUID = 1;

    TesseraPermissionException(Details details) {
        super(details);
    }
}
