package dev.tessera;

/** A deadline passed; {@link #peer()} and the message name the rank that was waited for. */
public final class TesseraTimeoutException extends TesseraException {
    private static final long serialVersionUID = 1;

    TesseraTimeoutException(Details details) {
        super(details);
    }
}
