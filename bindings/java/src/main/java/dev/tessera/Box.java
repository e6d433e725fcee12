package dev.tessera;

import java.util.Arrays;

/** A part of a tensor: offset and size in each dimension, in elements. */
public final class Box {
    private final long[] offsets;
    private final long[] sizes;

    /**
     * A box.
     *
     * @param offsets where it begins
     * @param sizes how far it reaches, as many numbers
     */
    public Box(long[] offsets, long[] sizes) {
        if (offsets.length != sizes.length) {
            throw new IllegalArgumentException("a box has " + offsets.length + " offsets but " + sizes.length + " sizes");
        }
        this.offsets = offsets.clone();
        this.sizes = sizes.clone();
    }

    /**
     * Where it begins.
     *
     * @return a copy
     */
    public long[] offsets() {
        return offsets.clone();
    }

    /**
     * How far it reaches.
     *
     * @return a copy
     */
    public long[] sizes() {
        return sizes.clone();
    }

    @Override
    public boolean equals(Object other) {
        return other instanceof Box && Arrays.equals(((Box) other).offsets, offsets)
                && Arrays.equals(((Box) other).sizes, sizes);
    }

    @Override
    public int hashCode() {
        return 31 * Arrays.hashCode(offsets) + Arrays.hashCode(sizes);
    }

    @Override
    public String toString() {
        return "Box(offsets " + Arrays.toString(offsets) + ", sizes " + Arrays.toString(sizes) + ")";
    }
}
