package dev.tessera;

import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.Objects;
import java.util.concurrent.ConcurrentHashMap;

/**
 * A named n-dimensional arrangement of ranks, row-major, with a communicator for each dimension (of the ranks that
 * differ only in that coordinate).
 */
public final class Mesh extends NativeObject {
    private final Map<String, Comm> comms = new ConcurrentHashMap<>();

    private final Mesh whole; // whose communicators a slice has; null if they are this one's own
    final List<String> names; // of the dimensions

    private Mesh(long handle, List<String> names) {
        super(new Ref("Mesh", handle, Native::meshDestroy));
        whole = null;
        this.names = names;
    }

    private Mesh(long handle, Mesh whole, List<String> names) {
        super(new Ref("Mesh", handle, Native::meshDestroy).mayLeak().dependOn(whole.ref));
        this.whole = whole;
        this.names = names;
    }

    /**
     * Start building a mesh over the ranks of {@code comm}.
     *
     * @param comm the ranks
     * @return a builder without dimensions
     */
    public static Builder over(Comm comm) {
        return new Builder(comm);
    }

    /** Collects the dimensions of a mesh. */
    public static final class Builder {
        private final Comm comm;
        private final Map<String, Integer> dims = new LinkedHashMap<>();

        private Builder(Comm comm) {
            this.comm = Objects.requireNonNull(comm, "comm");
        }

        /**
         * Add a dimension, inside those added before.
         *
         * @param name "dp", "tp"
         * @param size number of ranks along it
         * @return this
         */
        public Builder dim(String name, int size) {
            if (dims.putIfAbsent(Objects.requireNonNull(name, "name"), size) != null) {
                throw new IllegalArgumentException("the mesh already has a dimension \"" + name + "\"");
            }
            return this;
        }

        /**
         * Create the mesh and its communicators. Collective.
         *
         * @return the mesh
         * @throws TesseraInvalidArgumentException if the sizes' product is not the world size
         */
        public Mesh build() {
            final byte[][] names = comm.orRefuse(Creation.MESH,
                    () -> dims.keySet().stream().map(n -> Native.utf8(n, "name")).toArray(byte[][]::new));
            final int[] sizes = dims.values().stream().mapToInt(Integer::intValue).toArray();
            final List<String> known = List.copyOf(dims.keySet());
            return new Mesh(comm.ref.callLongExclusive(c -> Native.meshCreate(c, names, sizes)), known);
        }
    }

    /**
     * The number of dimensions.
     *
     * @return at least 1
     */
    public int ndim() {
        return (int) ref.callLong(Native::meshNdim);
    }

    /**
     * The size of a dimension.
     *
     * @param name of the dimension
     * @return number of ranks along it
     * @throws TesseraNotFoundException if the dimension does not exist
     */
    public int size(String name) {
        final byte[] text = Native.utf8(name, "name");
        return (int) (ref.callLong(h -> Native.meshDim(h, text)) >> 32);
    }

    /**
     * This rank's coordinate in a dimension.
     *
     * @param name of the dimension
     * @return 0 to size - 1
     * @throws TesseraNotFoundException if the dimension does not exist
     */
    public int coordinate(String name) {
        final byte[] text = Native.utf8(name, "name");
        return (int) ref.callLong(h -> Native.meshDim(h, text));
    }

    /**
     * The communicator of a dimension, always the same object; it is closed with the mesh.
     *
     * @param name of the dimension
     * @return the communicator
     * @throws TesseraNotFoundException if the dimension does not exist
     */
    public Comm comm(String name) {
        final byte[] text = Native.utf8(name, "name");
        if (whole != null) {
            ref.callLong(h -> Native.meshDim(h, text)); // is one of this slice's
            return whole.comm(name);
        }
        return ref.call(h -> comms.computeIfAbsent(name, n -> Comm.ofMesh(this, Native.meshComm(h, text))));
    }

    /**
     * A mesh of some of the dimensions, with the same communicators; it is closed with this one.
     *
     * @param names of dimensions, in this mesh's order
     * @return the slice
     * @throws TesseraNotFoundException if the dimension does not exist
     * @throws TesseraInvalidArgumentException if the order differs
     */
    public Mesh slice(String... names) {
        final byte[][] list = new byte[names.length][];
        for (int i = 0; i < names.length; ++i) {
            list[i] = Native.utf8(names[i], "name");
        }
        final List<String> known = List.of(names);
        return ref.call(h -> new Mesh(Native.meshSlice(h, list), whole != null ? whole : this, known));
    }

    /**
     * A one-dimensional mesh of all dimensions of this one, with its own communicator. Collective.
     *
     * @param comm the communicator that the mesh (or, for a slice, its mesh) was made from; exclusive
     * @param name name of the new dimension; null for the joined names ("_") of the flattened ones
     * @return the mesh
     * @throws TesseraMismatchException if the ranks flatten different dimensions
     */
    public Mesh flatten(Comm comm, String name) {
        final byte[] text = name == null ? null : comm.orRefuse(Creation.MESH, () -> Native.utf8(name, "name"));
        final List<String> known = List.of(name != null ? name : String.join("_", names));
        return new Mesh(Comm.creating(comm, Creation.MESH, reached -> ref.callLong(h -> comm.ref.callLongExclusive(c -> {
            reached.set(true);
            return Native.meshFlatten(h, c, text);
        }))), known);
    }
}
