package dev.tessera;

import java.util.ArrayList;
import java.util.Arrays;
import java.util.List;
import java.util.stream.Collectors;

/**
 * How a global tensor is distributed over the ranks. Pure arithmetic; only {@link #gather} communicates. Small; the
 * garbage collector frees it if it is not closed. All methods may be called from any thread.
 */
public final class Layout extends NativeObject {
    private final int ndim;

    Layout(long handle, int ndim) {
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
            throw new IllegalArgumentException("got " + placements.length + " placements for a mesh of " + meshSizes.length
                    + " dimensions; pass one for each dimension");
        }
        final int[] pairs = new int[2 * placements.length];
        for (int i = 0; i < placements.length; ++i) {
            pairs[2 * i] = placements[i].kind();
            pairs[2 * i + 1] = placements[i].dim();
        }
        return new Layout(Native.layoutCreate(shape, meshSizes, pairs), shape.length);
    }

    /**
     * A layout from explicit boxes, which must lie inside the tensor; any two must be equal (replicas) or disjoint.
     *
     * @param shape of the global tensor, at most 8 dimensions
     * @param boxes the boxes of rank 0, of rank 1, and so on
     * @return the layout
     * @throws TesseraInvalidArgumentException if boxes overlap or lie outside
     */
    public static Layout ofBoxes(long[] shape, List<List<Box>> boxes) {
        final int[] counts = boxes.stream().mapToInt(List::size).toArray();
        final List<Box> all = boxes.stream().flatMap(List::stream).collect(Collectors.toList());
        return new Layout(Native.layoutFromBoxes(shape, numbers(shape, all), counts), shape.length);
    }

    /**
     * A layout from explicit boxes, where each rank knows only its own. The ranks exchange only their offsets and
     * sizes; all get the layout that {@link #ofBoxes} would make of all boxes. Collective.
     *
     * @param comm the ranks
     * @param shape of the global tensor, at most 8 dimensions, the same on every rank
     * @param boxes of this rank, in the order of its pieces
     * @return the layout
     * @throws TesseraInvalidArgumentException on all ranks, if a box lies outside or two overlap partially; the message
     *     names their ranks
     * @throws TesseraMismatchException if the ranks pass different shapes, or one calls another collective
     */
    public static Layout gather(Comm comm, long[] shape, List<Box> boxes) {
        final long[] numbers = numbers(shape, boxes);
        final int count = boxes.size();
        return new Layout(
                comm.ref.callLongExclusive(c -> Native.layoutGather(c, shape, numbers, count)), shape.length);
    }

    /** Offsets and sizes of each box, in turn. */
    private static long[] numbers(long[] shape, List<Box> boxes) {
        if (shape.length > 8) {
            throw new IllegalArgumentException("the shape has " + shape.length + " dimensions; at most 8 are supported");
        }
        final List<long[]> parts = new ArrayList<>();
        for (Box box : boxes) {
            if (box.sizes().length != shape.length) {
                throw new IllegalArgumentException(box + " does not fit a tensor of " + shape.length + " dimensions");
            }
            parts.add(box.offsets());
            parts.add(box.sizes());
        }
        return parts.stream().flatMapToLong(Arrays::stream).toArray();
    }

    /**
     * The boxes of {@code rank}, without empty ones; a 0-d tensor has one box.
     *
     * @param rank 0 to world size - 1
     * @return its boxes, in order
     * @throws TesseraInvalidArgumentException if the rank does not exist
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
