package dev.tessera;

import java.time.Duration;

/**
 * How long tests wait for what has to happen, on a machine that may be slow: what tests/patience.hpp is in C++. A timeout
 * that is itself under test stays as it is.
 */
final class Patience {
    private static final double FACTOR = factor();

    private Patience() {}

    static Duration of(Duration span) {
        return Duration.ofNanos(Math.round(span.toNanos() * FACTOR));
    }

    static long seconds(long seconds) {
        return of(Duration.ofSeconds(seconds)).toSeconds();
    }

    static long millis(long millis) {
        return of(Duration.ofMillis(millis)).toMillis();
    }

    private static double factor() {
        final String given = System.getenv("TESSERA_TEST_PATIENCE");
        final double factor = given == null ? 1 : Double.parseDouble(given);
        if (!(factor >= 1)) {
            throw new IllegalStateException("TESSERA_TEST_PATIENCE is " + given + "; at least 1");
        }
        return factor;
    }
}
