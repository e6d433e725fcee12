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
    /** {@code short}; for checkpoints only, cannot be reduced. */
    I16(9, 2),
    /** One byte, 0 or 1; for checkpoints only, cannot be reduced. */
    BOOL(10, 1),
    /** Unsigned 16-bit integer; like all that follow for checkpoints only: cannot be reduced or converted. */
    U16(11, 2),
    /** Unsigned 32-bit integer. */
    U32(12, 4),
    /** Unsigned 64-bit integer. */
    U64(13, 8),
    /** 8-bit float without infinities: {@code float8_e4m3fn}. */
    F8_E4M3(14, 1),
    /** 8-bit float: {@code float8_e5m2}. */
    F8_E5M2(15, 1),
    /** 8-bit exponent: {@code float8_e8m0fnu}. */
    F8_E8M0(16, 1),
    /** Complex number of two {@code float}s. */
    C64(17, 8),
    /** Complex number of two {@code double}s; not in the native format. */
    C128(18, 16);

    private final int number;
    private final int size;

    DType(int number, int size) {
        this.number = number;
        this.size = size;
    }

    /**
     * Bytes of one element.
     *
     * @return 1, 2, 4, 8 or 16
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
        throw new IllegalArgumentException("the dtype " + number + " is unknown to this binding");
    }
}
