package dev.tessera;

import java.util.Objects;

/** The TCP server of a {@link Store}; it serves from its own thread until it is closed. */
public final class StoreServer extends NativeObject {
    private StoreServer(long handle) {
        super(new Ref("StoreServer", handle, Native::storeServerDestroy));
    }

    /**
     * Start a server that listens only on the given address, with default options.
     *
     * @param host numeric address or name
     * @param port 0 selects a free port
     * @return the server
     * @throws TesseraIoException if the address is in use
     * @throws TesseraPermissionException if there is no token
     */
    public static StoreServer serve(String host, int port) {
        return serve(host, port, new StoreOptions());
    }

    /**
     * Start a server that listens only on the given address.
     *
     * @param host numeric address or name
     * @param port 0 selects a free port
     * @param options token, epoch and so on
     * @return the server
     * @throws TesseraIoException if the address is in use
     * @throws TesseraPermissionException if there is no token
     */
    public static StoreServer serve(String host, int port, StoreOptions options) {
        if (port < 0 || port > 65535) {
            throw new IllegalArgumentException("the port is " + port + "; it must be 0 to 65535");
        }
        Objects.requireNonNull(options, "options");
        return new StoreServer(Native.storeServe(Native.utf8(host, "host"), port, options));
    }

    /**
     * The port on which it listens.
     *
     * @return 1 to 65535
     */
    public int port() {
        return (int) ref.callLong(Native::storeServerPort);
    }
}
