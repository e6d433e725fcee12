package dev.tessera;

/** How one dimension of a mesh distributes a tensor. */
public final class Placement {
    private static final Placement REPLICATE = new Placement(1, 0);

    private final int kind;
    private final int dim;

    private Placement(int kind, int dim) {
        this.kind = kind;
        this.dim = dim;
    }

    /**
     * Every rank of the dimension holds the same data.
     *
     * @return the placement
     */
    public static Placement replicate() {
        return REPLICATE;
    }

    /**
     * The ranks of the dimension hold parts: ceil(size / ranks) each, then a shorter one, then empty ones.
     *
     * @param dim the tensor's dimension that is sharded
     * @return the placement
     */
    public static Placement shard(int dim) {
        return new Placement(2, dim);
    }

    int kind() {
        return kind;
    }

    int dim() {
        return dim;
    }

    @Override
    public boolean equals(Object other) {
        return other instanceof Placement && ((Placement) other).kind == kind && ((Placement) other).dim == dim;
    }

    @Override
    public int hashCode() {
        return 31 * kind + dim;
    }

    @Override
    public String toString() {
        return kind == 1 ? "R" : "S(" + dim + ")";
    }
}
