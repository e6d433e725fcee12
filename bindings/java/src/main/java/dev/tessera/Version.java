package dev.tessera;

/** Which library was loaded. */
public final class Version {
    /** The version of these classes. */
    static final String JAVA_BINDING = "0.1.0";

    private Version() {}

    /**
     * The version of the native library.
     *
     * @return "0.1.0"
     */
    public static String library() {
        return Native.text(Native.version());
    }

    /**
     * The version of this Java binding.
     *
     * @return "0.1.0"
     */
    public static String binding() {
        return JAVA_BINDING;
    }

    /**
     * The ABI that the native library implements. It is compared with the binding's when the library is loaded.
     *
     * @return the number
     */
    public static int abi() {
        return Native.abiVersion();
    }

    /**
     * The file that the native library was loaded from.
     *
     * @return its path, or "" if unknown
     */
    public static String libraryPath() {
        return Native.text(Native.libraryPath());
    }
}
