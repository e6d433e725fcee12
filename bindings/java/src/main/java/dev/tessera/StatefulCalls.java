package dev.tessera;

import java.nio.ByteBuffer;
import java.util.ArrayList;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.Objects;
import java.util.concurrent.atomic.AtomicReference;

/**
 * Called by the shims of state.cc for a {@link Stateful}. These methods return only a status and, on failure, a
 * message. {@code values} is the native part of a state that is borrowed from the library for the call.
 */
final class StatefulCalls {
    private final Stateful object;
    private final AtomicReference<Throwable> thrown; // of the state: what an object threw last
    private List<String> names = List.of(); // that it gave last, and is given back

    StatefulCalls(Stateful object, AtomicReference<Throwable> thrown) {
        this.object = object;
        this.thrown = thrown;
    }

    int collect(long values, ByteBuffer message) {
        try {
            final List<String> given = new ArrayList<>();
            for (Map.Entry<String, ?> entry
                    : Objects.requireNonNull(object.stateDict(), "stateDict() returned null").entrySet()) {
                final byte[] name = Native.utf8(entry.getKey(), "name");
                Native.stateSetValue(values, name, Native.utf8(Values.toJson(entry.getValue()), "value"));
                given.add(entry.getKey());
            }
            names = given;
            return 0;
        } catch (Throwable error) {
            return failed(error, message);
        }
    }

    int check(long values, ByteBuffer message) {
        try {
            object.checkStateDict(given(values));
            return 0;
        } catch (Throwable error) {
            return failed(error, message);
        }
    }

    int apply(long values, ByteBuffer message) {
        try {
            object.loadStateDict(given(values));
            return 0;
        } catch (Throwable error) {
            return failed(error, message);
        }
    }

    private Map<String, Object> given(long values) {
        final Map<String, Object> found = new LinkedHashMap<>();
        for (String name : names) {
            found.put(name, Values.fromJson(Native.text(Native.stateGetValue(values, Native.utf8(name, "name")))));
        }
        return found;
    }

    private int failed(Throwable error, ByteBuffer message) {
        thrown.set(error);
        return Failures.failed(error, message);
    }
}
