package dev.tessera;

import java.util.Objects;
import java.util.function.BiConsumer;

/** The native library's log: one for the process. It goes to standard error unless a handler is set. */
public final class Log {
    /** Importance of a line. */
    public enum Level {
        /** For those who work on Tessera. */
        DEBUG,
        /** What happens. */
        INFO,
        /** What may be wrong. */
        WARNING,
        /** What is wrong. */
        ERROR,
        /** Above all lines: silence. */
        OFF
    }

    private Log() {}

    /**
     * Drop lines below {@code level}. At first it is what the environment's TESSERA_LOG says (debug, info, warning, error,
     * off), else WARNING.
     *
     * @param level the lowest level to be seen
     */
    public static void setLevel(Level level) {
        Native.logSetLevel(level.ordinal() + 1);
    }

    /**
     * Send the lines to {@code handler}, which may be called from any thread, one line at a time or several. It must not
     * call Tessera; what it throws is dropped.
     *
     * @param handler takes level and line; null: back to standard error
     */
    public static void setHandler(BiConsumer<Level, String> handler) {
        Native.logSetHandler(handler);
    }

    /** Called by the shims. */
    static void line(Object handler, int level, byte[] line) {
        try {
            @SuppressWarnings("unchecked")
            final BiConsumer<Level, String> target = (BiConsumer<Level, String>) Objects.requireNonNull(handler);
            target.accept(Level.values()[level - 1], Native.text(line));
        } catch (Throwable dropped) { // it must not reach the library's thread
            System.getLogger("dev.tessera").log(System.Logger.Level.WARNING, "the handler of Tessera's log failed", dropped);
        }
    }
}
