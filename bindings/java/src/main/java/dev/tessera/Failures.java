package dev.tessera;

import java.io.FileNotFoundException;
import java.io.IOException;
import java.net.SocketTimeoutException;
import java.nio.ByteBuffer;
import java.nio.CharBuffer;
import java.nio.charset.StandardCharsets;
import java.nio.file.AccessDeniedException;
import java.nio.file.NoSuchFileException;
import java.util.concurrent.TimeoutException;

/** Converts exceptions of user callbacks to the status and message that the library takes. */
final class Failures {
    private static final int FAILED = -1;

    private Failures() {}

    /** The status: a code of the library, or FAILED; {@code message} gets class and text, as much as there is room. */
    static int failed(Throwable error, ByteBuffer message) {
        try {
            final String text = error.getClass().getSimpleName() + ": " + error.getMessage();
            // Cut between two characters; the last byte stays 0.
            message.limit(message.capacity() - 1);
            StandardCharsets.UTF_8.newEncoder().encode(CharBuffer.wrap(text.replace('\0', ' ')), message, true);
        } catch (Throwable noText) {
            // The status must do.
        }
        if (error instanceof InterruptedException) {
            Thread.currentThread().interrupt();
            return ErrorCode.INTERRUPTED.number();
        }
        return statusOf(error);
    }

    private static int statusOf(Throwable error) {
        if (error instanceof TesseraException) {
            return ((TesseraException) error).code().number();
        }
        if (error instanceof FileNotFoundException || error instanceof NoSuchFileException) {
            return ErrorCode.NOT_FOUND.number();
        }
        // Hadoop's own exception of that name, which this class must not need.
        if (error instanceof AccessDeniedException || error.getClass().getSimpleName().equals("AccessControlException")) {
            return ErrorCode.PERMISSION.number();
        }
        if (error instanceof SocketTimeoutException || error instanceof TimeoutException) {
            return ErrorCode.TIMEOUT.number();
        }
        if (error instanceof OutOfMemoryError) {
            return ErrorCode.NO_MEMORY.number();
        }
        return error instanceof IOException ? ErrorCode.IO.number() : FAILED;
    }
}
