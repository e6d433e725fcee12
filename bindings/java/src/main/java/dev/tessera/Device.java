package dev.tessera;

import java.util.Objects;

/** Where a tensor's memory is. */
public final class Device {
    private static final Device CPU = new Device(1, 0);

    private final int type;
    private final int index;

    private Device(int type, int index) {
        this.type = type;
        this.index = index;
    }

    /**
     * Host memory.
     *
     * @return the device
     */
    public static Device cpu() {
        return CPU;
    }

    /**
     * Memory of a CUDA device.
     *
     * @param index counted from 0
     * @return the device
     */
    public static Device cuda(int index) {
        return new Device(2, index);
    }

    int type() {
        return type;
    }

    int index() {
        return index;
    }

    @Override
    public boolean equals(Object other) {
        return other instanceof Device && ((Device) other).type == type && ((Device) other).index == index;
    }

    @Override
    public int hashCode() {
        return Objects.hash(type, index);
    }

    @Override
    public String toString() {
        return type == 1 ? "cpu" : "cuda:" + index;
    }
}
