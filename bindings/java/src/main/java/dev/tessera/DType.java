package dev.tessera;

/** Element types. */
public enum DType {
    /** IEEE half precision. */
    F16(1, 2),
    /** bfloat16. */
    BF16(2, 2),
    /** {@code float}. */
    F32(3, 4),
    /** {@code double}. */
    F64(4, 8),
    /** {@code byte}. */
    I8(5, 1),
    /** Unsigned byte. */
    U8(6, 1),
    /** {@code int}. */
    I32(7, 4),
    /** {@code long}. */
    I64(8, 8),
    /** {@code short}; in checkpoints only, no reduction. */
    I16(9, 2),
    /** One byte, 0 or 1; in checkpoints only, no reduction. */
    BOOL(10, 1);

    private final int number;
    private final int size;

    DType(int number, int size) {
        this.number = number;
        this.size = size;
    }

    /**
     * Bytes of one element.
     *
     * @return 1, 2, 4 or 8
     */
    public int size() {
        return size;
    }

    int number() {
        return number;
    }

    static DType of(long number) {
        for (DType dtype : values()) {
            if (dtype.number == number) {
                return dtype;
            }
        }
        throw new IllegalArgumentException("this binding does not know the dtype " + number);
    }
}
