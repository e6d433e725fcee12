package dev.tessera;

import java.util.concurrent.atomic.AtomicReference;

/** Called by the shims: keeps an exception of a user's {@link Progress} until it can be thrown on the user's thread. */
final class ProgressRelay {
    private final Progress user;
    private final AtomicReference<Throwable> caught = new AtomicReference<>();

    private ProgressRelay(Progress user) {
        this.user = user;
    }

    static ProgressRelay of(Progress user) {
        return user == null ? null : new ProgressRelay(user);
    }

    /** Called by the shims, on any thread. */
    void update(int phase, long done, long total) {
        if (caught.get() != null) {
            return;
        }
        try {
            user.update(Progress.Phase.values()[phase - 1], done, total);
        } catch (Throwable thrown) {
            caught.compareAndSet(null, thrown);
        }
    }

    /** Throws the caught exception, once; {@code relay} may be null. */
    static void settle(ProgressRelay relay) {
        final Throwable thrown = relay == null ? null : relay.caught.getAndSet(null);
        if (thrown != null) {
            ProgressRelay.<RuntimeException>sneak(thrown);
        }
    }

    @SuppressWarnings("unchecked")
    private static <T extends Throwable> void sneak(Throwable thrown) throws T {
        throw (T) thrown; // code in other languages of the JVM may throw what Java would have to declare
    }
}
