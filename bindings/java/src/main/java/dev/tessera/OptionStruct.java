package dev.tessera;

import java.nio.ByteBuffer;
import java.nio.ByteOrder;
import java.util.HashMap;
import java.util.Map;
import java.util.function.Consumer;

/**
 * A struct of options in native memory, as in C. The library writes its defaults into it, and setters overwrite them;
 * the shims pass it on unchanged. {@code T} is the class that the program sees.
 */
abstract class OptionStruct<T> {
    final ByteBuffer struct;
    private final Map<Integer, ByteBuffer> texts = new HashMap<>(); // what its pointers point at, by their offsets

    OptionStruct(int bytes, Consumer<Object> init) {
        struct = ByteBuffer.allocateDirect(bytes).order(ByteOrder.nativeOrder());
        init.accept(this);
    }

    /** A copy of one without texts. */
    OptionStruct(OptionStruct<T> from) {
        struct = ByteBuffer.allocateDirect(from.struct.capacity()).order(ByteOrder.nativeOrder());
        struct.put(from.struct.duplicate()).clear();
    }

    @SuppressWarnings("unchecked")
    private T self() {
        return (T) this;
    }

    final T with(int offset, int value) {
        struct.putInt(offset, value);
        return self();
    }

    final T with(int offset, long value) {
        struct.putLong(offset, value);
        return self();
    }

    final T with(int offset, double value) {
        struct.putDouble(offset, value);
        return self();
    }

    final T with(int offset, byte[] text) {
        final ByteBuffer copy = ByteBuffer.allocateDirect(text.length + 1).put(text); // and a final 0
        texts.put(offset, copy);
        return with(offset, Native.directAddress(copy));
    }

    final T withSize(int offset, long value, String what) {
        if (value < 0) {
            throw new IllegalArgumentException(what + " is " + value + "; it must not be negative");
        }
        return with(offset, value);
    }

    final boolean flag(int offset) {
        return struct.getInt(offset) != 0;
    }
}
