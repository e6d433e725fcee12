package dev.tessera;

import java.util.ArrayList;
import java.util.Arrays;
import java.util.List;

/**
 * How a global tensor lies on the ranks of a mesh: arithmetic only, no messages. Small; one that is not closed is freed by
 * the garbage collector. All methods may be called from any thread.
 */
public final class Layout extends NativeObject {
    private final int ndim;

    private Layout(long handle, int ndim) {
        super(new Ref("Layout", handle, Native::layoutDestroy).mayLeak());
        this.ndim = ndim;
    }

    /**
     * A layout from placements; the mesh's dimensions are applied in order.
     *
     * @param shape of the global tensor, at most 8 dimensions
     * @param meshSizes of the mesh, ranks row-major
     * @param placements one for each dimension of the mesh
     * @return the layout
     * @throws TesseraInvalidArgumentException if a placement shards a dimension that the tensor lacks
     */
    public static Layout of(long[] shape, int[] meshSizes, Placement... placements) {
        if (placements.length != meshSizes.length) {
            throw new IllegalArgumentException(placements.length + " placements for a mesh of " + meshSizes.length
                    + " dimensions: one each is needed");
        }
        final int[] pairs = new int[2 * placements.length];
        for (int i = 0; i < placements.length; ++i) {
            pairs[2 * i] = placements[i].kind();
            pairs[2 * i + 1] = placements[i].dim();
        }
        return new Layout(Native.layoutCreate(shape, meshSizes, pairs), shape.length);
    }

    /**
     * A layout from explicit boxes, which must lie inside the tensor; two are equal (replicas) or disjoint.
     *
     * @param shape of the global tensor, at most 8 dimensions
     * @param boxes those of rank 0, of rank 1, and so on
     * @return the layout
     * @throws TesseraInvalidArgumentException if boxes overlap or lie outside
     */
    public static Layout ofBoxes(long[] shape, List<List<Box>> boxes) {
        if (shape.length > 8) {
            throw new IllegalArgumentException("a shape of " + shape.length + " dimensions; at most 8 are supported");
        }
        final int[] counts = new int[boxes.size()];
        final List<long[]> parts = new ArrayList<>();
        for (int rank = 0; rank < counts.length; ++rank) {
            counts[rank] = boxes.get(rank).size();
            for (Box box : boxes.get(rank)) {
                if (box.sizes().length != shape.length) {
                    throw new IllegalArgumentException(box + " in a tensor of " + shape.length + " dimensions");
                }
                parts.add(box.offsets());
                parts.add(box.sizes());
            }
        }
        final long[] numbers = parts.stream().flatMapToLong(Arrays::stream).toArray();
        return new Layout(Native.layoutFromBoxes(shape, numbers, counts), shape.length);
    }

    /**
     * What {@code rank} holds. Empty boxes are left out; a 0-d tensor has one box.
     *
     * @param rank 0 to world size - 1
     * @return its boxes, in order
     * @throws TesseraInvalidArgumentException if there is no such rank
     */
    public List<Box> boxes(int rank) {
        return ref.call(h -> {
            final List<Box> boxes = new ArrayList<>();
            final int count = Native.layoutBoxCount(h, rank);
            for (int i = 0; i < count; ++i) {
                final long[] numbers = Native.layoutBox(h, rank, i);
                boxes.add(new Box(Arrays.copyOf(numbers, ndim), Arrays.copyOfRange(numbers, 8, 8 + ndim)));
            }
            return boxes;
        });
    }
}
