package dev.tessera;

import static org.junit.jupiter.api.Assertions.assertArrayEquals;
import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertFalse;
import static org.junit.jupiter.api.Assertions.assertNotEquals;
import static org.junit.jupiter.api.Assertions.assertNull;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import dev.tessera.CrossEntropyOptions.Reduction;
import dev.tessera.TensorParallel.Style;
import java.nio.DoubleBuffer;
import java.nio.file.Path;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.Random;
import java.util.concurrent.ConcurrentHashMap;
import java.util.concurrent.atomic.AtomicReference;
import java.util.function.BiConsumer;
import java.util.function.Function;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.function.Executable;
import org.junit.jupiter.api.io.TempDir;

/** Slices, regions, the vocabulary, optimizers and checkpoints: what N ranks compute is what one rank computes. */
class TensorParallelTest {
    private static final int ROWS = 7; // of the batch; uneven over 2 and 3 ranks
    private static final int IN = 5;
    private static final int OUT = 4;
    private static final double NEAR = 1e-12;

    @TempDir
    Path root;

    private interface Body {
        void run(Mesh mesh, int rank) throws Exception;
    }

    private static void onMesh(int ranks, Body body) throws Exception {
        Ranks.run(ranks, comm -> {
            try (Mesh mesh = Mesh.over(comm).dim("tp", ranks).build()) {
                body.run(mesh, comm.rank());
            }
        });
    }

    // --- plain arithmetic

    private static double[] random(int seed, int count) {
        return new Random(seed).doubles(count, -0.5, 0.5).toArray();
    }

    /** Of a[rows, inner] and b[columns, inner]. */
    private static double[] timesTransposed(double[] a, double[] b, int rows, int columns, int inner) {
        final double[] out = new double[rows * columns];
        for (int i = 0; i < out.length; ++i) {
            for (int k = 0; k < inner; ++k) {
                out[i] += a[i / columns * inner + k] * b[i % columns * inner + k];
            }
        }
        return out;
    }

    private static double[] transposed(double[] a, int rows, int columns) {
        final double[] out = new double[a.length];
        for (int i = 0; i < a.length; ++i) {
            out[i % columns * rows + i / columns] = a[i];
        }
        return out;
    }

    private static double[] columnSums(double[] a, int columns) {
        final double[] sums = new double[columns];
        for (int i = 0; i < a.length; ++i) {
            sums[i % columns] += a[i];
        }
        return sums;
    }

    private static double[] plus(double[] a, double[] row) {
        final double[] out = a.clone();
        for (int i = 0; i < a.length; ++i) {
            out[i] += row[i % row.length];
        }
        return out;
    }

    /** Where the part of a rank begins, for rank = ranks where it ends; like torch.chunk. */
    private static int begin(int size, int ranks, int rank) {
        return Math.min(size, rank * ((size + ranks - 1) / ranks));
    }

    private static long[] partShape(long[] shape, int dim, int ranks, int rank) {
        final long[] part = shape.clone();
        part[dim] = begin((int) shape[dim], ranks, rank + 1) - begin((int) shape[dim], ranks, rank);
        return part;
    }

    private static double[] partOf(double[] whole, long[] shape, int dim, int ranks, int rank) {
        final int inner = (int) Arrays.stream(shape).skip(dim + 1).reduce(1, (a, b) -> a * b);
        final int from = begin((int) shape[dim], ranks, rank);
        final int to = begin((int) shape[dim], ranks, rank + 1);
        final double[] part = new double[whole.length];
        int count = 0;
        for (int i = 0; i < whole.length; ++i) {
            final int at = (int) (i / inner % shape[dim]);
            if (at >= from && at < to) {
                part[count++] = whole[i];
            }
        }
        return Arrays.copyOf(part, count);
    }

    private static double[] values(Tensor tensor) {
        final double[] values = new double[(int) tensor.numel()];
        tensor.doubles().get(values);
        return values;
    }

    private static void add(Tensor to, double[] values) {
        final DoubleBuffer buffer = to.doubles();
        for (int i = 0; i < values.length; ++i) {
            buffer.put(i, buffer.get(i) + values[i]);
        }
    }

    private static void near(double[] expected, double[] found, String what) {
        assertArrayEquals(expected, found, NEAR, what);
    }

    // --- a perceptron of two layers

    /** Its parameters, and a batch with the gradient of its outputs. */
    private static final class Mlp {
        final int hidden;
        final Map<String, double[]> values = new LinkedHashMap<>();
        final Map<String, long[]> shapes = new LinkedHashMap<>();
        final double[] x = random(5, ROWS * IN);
        final double[] dy = random(6, ROWS * OUT);

        Mlp(int hidden) {
            this.hidden = hidden;
            add(1, "fc1.weight", hidden, IN);
            add(2, "fc1.bias", hidden);
            add(3, "fc2.weight", OUT, hidden);
            add(4, "fc2.bias", OUT);
        }

        private void add(int seed, String name, long... shape) {
            shapes.put(name, shape);
            values.put(name, random(seed, (int) Arrays.stream(shape).reduce(1, (a, b) -> a * b)));
        }

        Params params() {
            Params params = Params.of(Map.of());
            for (String name : values.keySet()) {
                params = params.and(name, Tensor.copyOf(values.get(name), shapes.get(name)));
            }
            return params;
        }

        TensorParallel.Builder deferred(Mesh mesh) {
            final TensorParallel.Builder builder = TensorParallel.over(mesh);
            shapes.forEach((name, shape) -> builder.deferred(name, DType.F64, shape));
            return builder.rule("fc1", Style.COLUMN).rule("fc2", Style.ROW);
        }

        TensorParallel.Builder filled(Mesh mesh) {
            return TensorParallel.over(mesh).params(params()).rule("fc1", Style.COLUMN).rule("fc2", Style.ROW);
        }
    }

    /** The perceptron with tanh between its layers, without the second bias; `width` of the hidden units. */
    private static final class Half {
        final int width;
        final double[] w1;
        final double[] w2;
        final double[] x;
        final double[] h;
        final double[] y;

        Half(double[] x, double[] w1, double[] b1, double[] w2) {
            this.x = x;
            this.w1 = w1;
            this.w2 = w2;
            width = b1.length;
            final int rows = x.length / IN;
            h = width == 0 ? new double[0] : Arrays.stream(plus(timesTransposed(x, w1, rows, width, IN), b1)).map(Math::tanh)
                    .toArray();
            y = timesTransposed(h, w2, rows, OUT, width);
        }

        /** Gives the gradients by their parameters' names to `to`, and returns that of x. */
        double[] backward(double[] dy, BiConsumer<String, double[]> to) {
            final int rows = x.length / IN;
            if (width == 0) {
                return new double[x.length];
            }
            to.accept("fc2.weight",
                    timesTransposed(transposed(dy, rows, OUT), transposed(h, rows, width), OUT, width, rows));
            final double[] dh = timesTransposed(dy, transposed(w2, OUT, width), rows, width, OUT);
            for (int i = 0; i < dh.length; ++i) {
                dh[i] *= 1 - h[i] * h[i];
            }
            to.accept("fc1.bias", columnSums(dh, width));
            to.accept("fc1.weight", timesTransposed(transposed(dh, rows, width), transposed(x, rows, IN), width, IN, rows));
            return timesTransposed(dh, transposed(w1, width, IN), rows, IN, width);
        }
    }

    private static Half half(TensorParallel tp, double[] x) {
        return new Half(x, values(tp.slice("fc1.weight")), values(tp.slice("fc1.bias")), values(tp.slice("fc2.weight")));
    }

    /** One step; with `dim` 0 the batch is cut over the ranks between the regions. */
    private static void expectOneRanks(Mesh mesh, int rank, int ranks, Mlp mlp, boolean cut) {
        final Half whole = new Half(mlp.x, mlp.values.get("fc1.weight"), mlp.values.get("fc1.bias"),
                mlp.values.get("fc2.weight"));
        final double[] expectedY = plus(whole.y, mlp.values.get("fc2.bias"));
        final Map<String, double[]> expected = new LinkedHashMap<>();
        expected.put("fc2.bias", columnSums(mlp.dy, OUT));
        final double[] expectedDx = whole.backward(mlp.dy, expected::put);
        final long[] xShape = {ROWS, IN};
        final long[] yShape = {ROWS, OUT};
        final long[] ownX = cut ? partShape(xShape, 0, ranks, rank) : xShape;
        final long[] ownY = cut ? partShape(yShape, 0, ranks, rank) : yShape;
        // Only rank 0 has values.
        final TensorParallel.Builder builder = rank == 0 ? mlp.filled(mesh) : mlp.deferred(mesh);
        try (TensorParallel tp = builder.options(new TpOptions().sequenceParallel(cut)).build()) {
            assertEquals(ownX[0], cut ? tp.part(ROWS) : ROWS);
            final Tensor x = Tensor.copyOf(cut ? partOf(mlp.x, xShape, 0, ranks, rank) : mlp.x, ownX);
            final Tensor entered = Tensor.zeros(DType.F64, xShape);
            if (cut) {
                tp.enter(x, 0, entered);
            } else {
                tp.enter(x, entered);
            }
            assertArrayEquals(mlp.x, values(entered));
            final Half half = half(tp, values(entered));
            final Tensor summand = Tensor.copyOf(half.y, yShape);
            final Tensor y = cut ? Tensor.zeros(DType.F64, ownY) : summand;
            if (cut) {
                tp.leave(summand, 0, y, tp.slice("fc2.bias"));
            } else {
                tp.leave(summand, summand, tp.slice("fc2.bias")); // in place
            }
            near(cut ? partOf(expectedY, yShape, 0, ranks, rank) : expectedY, values(y), "y");

            final Tensor dy = Tensor.copyOf(cut ? partOf(mlp.dy, yShape, 0, ranks, rank) : mlp.dy, ownY);
            add(tp.grad("fc2.bias"), columnSums(values(dy), OUT));
            final Tensor left = Tensor.zeros(DType.F64, yShape);
            if (cut) {
                tp.leaveBackward(dy, 0, left);
            } else {
                tp.leaveBackward(dy, left);
            }
            final Tensor dx = Tensor.copyOf(half.backward(values(left), (name, grad) -> add(tp.grad(name), grad)), xShape);
            final Tensor ownDx = Tensor.zeros(DType.F64, ownX);
            if (cut) {
                tp.enterBackward(dx, 0, ownDx);
            } else {
                tp.enterBackward(dx, ownDx);
            }
            tp.sumGrads();
            near(cut ? partOf(expectedDx, xShape, 0, ranks, rank) : expectedDx, values(ownDx), "dx");
            expected.forEach((name, grad) -> {
                final int dim = tp.cut(name);
                near(dim < 0 ? grad : partOf(grad, mlp.shapes.get(name), dim, ranks, rank), values(tp.grad(name)), name);
            });
            tp.zeroGrad();
            assertArrayEquals(new double[OUT], values(tp.grad("fc2.bias")));
        }
    }

    @Test
    void outputsAndGradientsOfAPerceptronAreThoseOfOneRank() throws Exception {
        for (int size = 1; size <= 3; ++size) {
            final int ranks = size;
            onMesh(ranks, (mesh, rank) -> {
                for (int hidden : new int[] {8, 13, 1}) { // the last: most ranks have no unit
                    expectOneRanks(mesh, rank, ranks, new Mlp(hidden), false);
                    expectOneRanks(mesh, rank, ranks, new Mlp(hidden), true);
                }
            });
        }
    }

    @Test
    void activationsMayBeCutAlongAnyDimension() throws Exception {
        final long[] shape = {2, 5, 3};
        final double[] whole = random(1, 30);
        onMesh(3, (mesh, rank) -> {
            try (TensorParallel tp = new Mlp(8).deferred(mesh).build()) {
                for (int dim = 0; dim < 3; ++dim) {
                    final double[] own = partOf(whole, shape, dim, 3, rank);
                    final Tensor full = Tensor.copyOf(whole, shape);
                    final Tensor part = Tensor.zeros(DType.F64, partShape(shape, dim, 3, rank));
                    assertEquals(part.shape()[dim], tp.part(shape[dim]));
                    tp.split(full, dim, part);
                    assertArrayEquals(own, values(part));
                    final Tensor gathered = Tensor.zeros(DType.F64, shape);
                    tp.gather(part, dim, gathered);
                    assertArrayEquals(whole, values(gathered));
                    tp.leave(full, dim, part);
                    near(Arrays.stream(own).map(v -> 3 * v).toArray(), values(part), "a sum along " + dim);
                }
                final Tensor sum = Tensor.zeros(DType.F64, shape);
                tp.leave(Tensor.copyOf(whole, shape), sum);
                near(Arrays.stream(whole).map(v -> 3 * v).toArray(), values(sum), "the sum");
                assertEquals(0, tp.part(0));
                assertEquals(rank == 0 ? 1 : 0, tp.part(1));
                assertEquals(Long.MAX_VALUE / 3 + (rank == 2 ? -1 : 1), tp.part(Long.MAX_VALUE));
            }
        });
    }

    // --- parameters

    @Test
    void slicesHaveTheValuesOfRank0() throws Exception {
        final Mlp mlp = new Mlp(13);
        onMesh(3, (mesh, rank) -> {
            final Mlp own = new Mlp(13);
            Arrays.setAll(own.values.get("fc1.weight"), i -> 100 * rank + mlp.values.get("fc1.weight")[i]);
            for (boolean sync : new boolean[] {true, false}) {
                try (TensorParallel tp = own.filled(mesh).options(new TpOptions().syncValues(sync)).build()) {
                    final Mlp source = sync ? mlp : own;
                    assertEquals(List.of("fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias"), tp.names());
                    final int[] cuts = {0, 0, 1, -1};
                    for (int i = 0; i < 4; ++i) {
                        final String name = tp.names().get(i);
                        final long[] shape = mlp.shapes.get(name);
                        assertEquals(cuts[i], tp.cut(name));
                        assertArrayEquals(shape, tp.shape(name));
                        assertEquals(tp.slice(name).address(), tp.slice(name).address());
                        assertEquals(tp.grad(name).address(), tp.grad(name).address());
                        assertArrayEquals(tp.slice(name).shape(), tp.grad(name).shape());
                        assertArrayEquals(cuts[i] < 0 ? shape : partShape(shape, cuts[i], 3, rank), tp.slice(name).shape());
                        final double[] full = source.values.get(name);
                        final double[] part = cuts[i] < 0 ? full : partOf(full, shape, cuts[i], 3, rank);
                        assertArrayEquals(part, values(tp.slice(name)));
                    }
                    assertTrue(tp.toString().contains("fc2.bias"), tp.toString());
                }
            }
        });
    }

    @Test
    void everyStyleCutsAsItSays() throws Exception {
        onMesh(2, (mesh, rank) -> {
            final Map<String, Style> plan = new LinkedHashMap<>();
            plan.put("tok", Style.VOCABULARY);
            plan.put("norm?", Style.SEQUENCE);
            plan.put("head.*", Style.REPLICATE);
            plan.put("conv", Style.shard(2));
            // q and k, of which each rank has half: boxes one after another.
            final List<List<Box>> boxes = new ArrayList<>();
            for (int r = 0; r < 2; ++r) {
                final long[] row = {1, 2};
                boxes.add(List.of(new Box(new long[] {r, 0}, row), new Box(new long[] {2 + r, 0}, row)));
            }
            final Layout layout = Layout.ofBoxes(new long[] {4, 2}, boxes);
            plan.put("qk", Style.layout(layout));
            try (TensorParallel tp = TensorParallel.over(mesh, "tp").plan(plan)
                    .params(Params.of("tok.weight", Tensor.copyOf(random(1, 9), 3, 3)))
                    .params(Params.of("norm1", Tensor.zeros(DType.F64, 2)))
                    .deferred("head.weight", DType.F64, 2).deferred("conv.weight", DType.F32, 1, 2, 5)
                    .params(Params.of("qk.weight", Tensor.copyOf(new double[] {0, 1, 2, 3, 4, 5, 6, 7}, 4, 2)))
                    .deferred("steps", DType.I64).build()) {
                layout.close(); // was read
                assertEquals(0, tp.cut("tok.weight"));
                assertEquals(-1, tp.cut("norm1"));
                assertEquals(-1, tp.cut("head.weight"));
                assertEquals(2, tp.cut("conv.weight"));
                assertEquals(DType.F32, tp.grad("conv.weight").dtype());
                assertArrayEquals(new long[] {1, 2, rank == 0 ? 3 : 2}, tp.slice("conv.weight").shape());
                assertArrayEquals(rank == 0 ? new double[] {0, 1, 4, 5} : new double[] {2, 3, 6, 7},
                        values(tp.slice("qk.weight")));
                assertArrayEquals(new long[0], tp.shape("steps"));
                refused("only floating-point parameters have a gradient", TesseraInvalidStateException.class,
                        () -> tp.grad("steps"));
                try (Layout of = tp.layout("qk.weight")) {
                    assertEquals(boxes.get(1), of.boxes(1));
                }
                tp.grad("norm1").doubles().put(1, 1 + rank);
                tp.sumGrads();
                assertEquals(3, tp.grad("norm1").doubles().get(1));
            }
            assertEquals("[VOCABULARY, SEQUENCE, REPLICATE, shard(2), layout]", plan.values().toString());
        });
    }

    @Test
    void theGroupMayBeADimensionOfALargerMesh() throws Exception {
        Ranks.run(4, comm -> {
            try (Mesh all = Mesh.over(comm).dim("dp", 2).dim("tp", 2).build();
                    TensorParallel tp = TensorParallel.over(all, "tp").params(Params.of("w", Tensor.zeros(DType.F64, 5)))
                            .rule("w", Style.COLUMN).build();
                    Layout layout = tp.layout("w");
                    Mesh flat = all.flatten(comm, null);
                    TensorParallel over4 = TensorParallel.over(flat).deferred("w", DType.F64, 5).rule("w", Style.COLUMN)
                            .build()) {
                assertEquals(List.of("dp_tp"), flat.names);
                assertArrayEquals(new long[] {3 - comm.rank() % 2}, tp.slice("w").shape());
                for (int rank = 0; rank < 4; ++rank) {
                    assertArrayEquals(new long[] {3 * (rank % 2)}, layout.boxes(rank).get(0).offsets());
                }
                assertArrayEquals(new long[] {Math.max(0, Math.min(2, 5 - 2 * comm.rank()))}, over4.slice("w").shape());
                final Tensor one = Tensor.copyOf(new double[] {comm.rank()});
                tp.leave(one, one);
                assertEquals(comm.rank() < 2 ? 1 : 5, one.doubles().get(0));
                try (TensorParallel of = TensorParallel.over(all.slice("dp")).deferred("w", DType.F64, 5).build()) {
                    of.leave(one, one);
                    assertEquals(6, one.doubles().get(0));
                }
                final String two = assertThrows(TesseraInvalidArgumentException.class,
                        () -> TensorParallel.over(all).deferred("w", DType.F64, 5).build()).getMessage();
                assertTrue(two.contains("dp 2, tp 2") && two.contains("pass a slice of one"), two);
                assertThrows(TesseraNotFoundException.class,
                        () -> TensorParallel.over(all, "pp").deferred("w", DType.F64, 5).build());
            }
        });
    }

    // --- the vocabulary

    private static Tensor longs(long[] shape, long... values) {
        final Tensor tensor = Tensor.zeros(DType.I64, shape);
        tensor.longs().put(values);
        return tensor;
    }

    @Test
    void anEmbeddingLooksUpAndAddsLikeOneRank() throws Exception {
        final int words = 7;
        final int features = 3;
        final double[] weight = random(1, words * features);
        final long[] ids = {0, 6, 3, 3, 2, 4, 6, 0};
        final long[] shape = {2, 4, features};
        final double[] dout = random(2, 24);
        final double[] expected = new double[24];
        final double[] dweight = new double[weight.length];
        for (int i = 0; i < 24; ++i) {
            final int at = (int) ids[i / features] * features + i % features;
            expected[i] = weight[at];
            dweight[at] += dout[i];
        }
        for (int size = 1; size <= 3; ++size) {
            final int ranks = size;
            onMesh(ranks, (mesh, rank) -> {
                for (Style style : List.of(Style.VOCABULARY, Style.REPLICATE)) {
                    try (TensorParallel tp = TensorParallel.over(mesh).rule("tok", style)
                            .params(Params.of("tok.weight", Tensor.copyOf(weight, words, features))).build()) {
                        final Tensor list = longs(new long[] {2, 4}, ids);
                        final double[] own = style == Style.REPLICATE ? dweight
                                : partOf(dweight, new long[] {words, features}, 0, ranks, rank);
                        final Tensor out = Tensor.zeros(DType.F64, shape);
                        tp.embed("tok.weight", list, out);
                        assertArrayEquals(expected, values(out));
                        tp.embedBackward("tok.weight", list, Tensor.copyOf(dout, shape));
                        near(own, values(tp.grad("tok.weight")), "the gradient");
                        for (int dim = 0; dim < 3; ++dim) {
                            final long[] partShape = partShape(shape, dim, ranks, rank);
                            final Tensor part = Tensor.zeros(DType.F64, partShape);
                            tp.embed("tok.weight", list, dim, part);
                            assertArrayEquals(partOf(expected, shape, dim, ranks, rank), values(part));
                            tp.zeroGrad();
                            final Tensor grad = Tensor.copyOf(partOf(dout, shape, dim, ranks, rank), partShape);
                            tp.embedBackward("tok.weight", list, grad, dim);
                            near(own, values(tp.grad("tok.weight")), "the gradient along " + dim);
                        }
                    }
                }
            });
        }
    }

    /** A plain computation, as PyTorch defines it; the losses of the rows, then the gradients of all logits. */
    private static double[] crossEntropy(double[] logits, long[] targets, int classes, double[] weights, double smoothing,
            Reduction reduction) {
        final double[] out = new double[targets.length + logits.length];
        double divisor = 0;
        for (int row = 0; row < targets.length; ++row) {
            if (targets[row] < 0) {
                continue;
            }
            final int y = (int) targets[row];
            divisor += weights[y];
            double sum = 0;
            for (int c = 0; c < classes; ++c) {
                sum += Math.exp(logits[row * classes + c]);
            }
            for (int c = 0; c < classes; ++c) {
                final double factor = smoothing / classes * weights[c] + (c == y ? (1 - smoothing) * weights[y] : 0);
                out[row] -= factor * (logits[row * classes + c] - Math.log(sum));
                for (int other = 0; other < classes; ++other) {
                    out[targets.length + row * classes + other] +=
                            factor * (Math.exp(logits[row * classes + other]) / sum - (other == c ? 1 : 0));
                }
            }
        }
        for (int i = 0; reduction == Reduction.MEAN && i < out.length; ++i) {
            out[i] /= divisor;
        }
        return out;
    }

    private static double[] losses(double[] plain, int rows, Reduction reduction) {
        final double[] losses = Arrays.copyOf(plain, rows);
        return reduction == Reduction.NONE ? losses : new double[] {Arrays.stream(losses).sum()};
    }

    @Test
    void crossEntropyIsThatOfOneRank() throws Exception {
        final int rows = 6;
        final int classes = 5;
        final double[] logits = random(1, rows * classes);
        final long[] targets = {4, 0, -7, 2, 3, 4};
        final double[] weights = {0.5, 1, 2, 0, 1.5};
        final double[] ones = {1, 1, 1, 1, 1};
        final long[] shape = {2, 3, classes};
        for (int size = 1; size <= 3; ++size) {
            final int ranks = size;
            onMesh(ranks, (mesh, rank) -> {
                try (TensorParallel tp = new Mlp(1).deferred(mesh).build()) {
                    final long[] partShape = partShape(shape, 2, ranks, rank);
                    final Tensor own = Tensor.copyOf(partOf(logits, shape, 2, ranks, rank), partShape);
                    final Tensor rightOnes = longs(new long[] {2, 3}, targets);
                    for (Reduction reduction : Reduction.values()) {
                        for (double[] of : new double[][] {ones, weights}) {
                            final CrossEntropyOptions options = new CrossEntropyOptions().reduction(reduction)
                                    .ignoreIndex(-7).labelSmoothing(0.1).gradScale(2);
                            if (of == weights) {
                                options.classWeights(Tensor.copyOf(weights));
                            }
                            final double[] plain = crossEntropy(logits, targets, classes, of, 0.1, reduction);
                            final double[] slopes = Arrays.copyOfRange(plain, rows, plain.length);
                            final long[] ofLoss = reduction == Reduction.NONE ? new long[] {2, 3} : new long[0];
                            final Tensor loss = Tensor.zeros(DType.F64, ofLoss);
                            final Tensor grad = Tensor.zeros(DType.F64, partShape);
                            tp.crossEntropy(own, rightOnes, classes, loss, grad, options);
                            near(losses(plain, rows, reduction), values(loss), reduction + " of the losses");
                            final double[] part = partOf(slopes, shape, 2, ranks, rank);
                            near(Arrays.stream(part).map(v -> 2 * v).toArray(), values(grad), reduction + ", gradients");
                        }
                    }
                    // All defaults, and no gradient; targets of the other type.
                    final Tensor same = Tensor.zeros(DType.I32, 2, 3);
                    same.ints().put(new int[] {4, 0, -100, 2, 3, 4});
                    final Tensor loss = Tensor.zeros(DType.F64);
                    tp.crossEntropy(own, same, classes, loss, null);
                    near(losses(crossEntropy(logits, targets, classes, ones, 0, Reduction.MEAN), rows, Reduction.MEAN),
                            values(loss), "the mean");
                    tp.crossEntropy(own, same, classes, loss, own); // in place
                    final double[] plain = crossEntropy(logits, targets, classes, ones, 0, Reduction.MEAN);
                    final double[] slopes = Arrays.copyOfRange(plain, rows, plain.length);
                    near(partOf(slopes, shape, 2, ranks, rank), values(own), "in place");
                }
            });
        }
    }

    @Test
    void theMeanIsOverTheRowsOfAllDataRanks() throws Exception {
        final double[] logits = random(1, 5 * 3);
        final long[] targets = {2, 0, 1, 1, 0};
        final double[] plain = crossEntropy(logits, targets, 3, new double[] {1, 1, 1}, 0, Reduction.MEAN);
        Ranks.run(4, comm -> {
            try (Mesh mesh = Mesh.over(comm).dim("dp", 2).dim("tp", 2).build();
                    TensorParallel tp = new Mlp(1).deferred(mesh.slice("tp")).build()) {
                final int replica = mesh.coordinate("dp"); // which has other rows: 2 and 3 of them
                final int from = replica == 0 ? 0 : 2;
                final int to = replica == 0 ? 2 : 5;
                final long[] shape = {to - from, 3};
                final int rank = mesh.coordinate("tp");
                final long[] partShape = partShape(shape, 1, 2, rank);
                final double[] own = partOf(Arrays.copyOfRange(logits, 3 * from, 3 * to), shape, 1, 2, rank);
                final Tensor rightOnes = longs(new long[] {to - from}, Arrays.copyOfRange(targets, from, to));
                final Tensor loss = Tensor.zeros(DType.F64);
                final Tensor grad = Tensor.zeros(DType.F64, partShape);
                tp.crossEntropy(Tensor.copyOf(own, partShape), rightOnes, 3, loss, grad,
                        new CrossEntropyOptions().dataRanks(mesh.comm("dp")));
                final double[] slopes = Arrays.copyOfRange(plain, 5 + 3 * from, 5 + 3 * to);
                near(partOf(slopes, shape, 1, 2, rank), values(grad), "gradients");
                mesh.comm("dp").allReduce(loss, ReduceOp.SUM);
                near(losses(plain, 5, Reduction.MEAN), values(loss), "the loss");
            }
        });
    }

    // --- training

    /** A step on the batch of `mlp`, whose target is zero; returns the loss. */
    private static double step(TensorParallel tp, Mlp mlp) {
        final Half half = half(tp, mlp.x);
        final Tensor y = Tensor.copyOf(half.y, ROWS, OUT);
        tp.leave(y, y, tp.slice("fc2.bias"));
        final double[] dy = values(y);
        tp.zeroGrad();
        add(tp.grad("fc2.bias"), columnSums(dy, OUT));
        half.backward(dy, (name, grad) -> add(tp.grad(name), grad));
        return Arrays.stream(dy).map(v -> v * v).sum();
    }

    private static Optimizer optimizer(TensorParallel tp, String which) {
        switch (which) {
            case "sgd":
                return Optimizer.sgd(tp).lr(0.02).momentum(0.9).build();
            case "adam":
                return Optimizer.adam(tp).lr(0.02).build();
            case "adagrad":
                return Optimizer.adagrad(tp).lr(0.02).build();
            case "lion":
                return Optimizer.lion(tp).lr(0.02).build();
            case "lamb":
                return Optimizer.lamb(tp).lr(0.02).build();
            default:
                return Optimizer.adamW(tp).lr(0.02).build();
        }
    }

    /** The losses of some steps, and the parameters after them. */
    private static List<double[]> train(Mesh mesh, Mlp mlp, String which) {
        final List<double[]> found = new ArrayList<>();
        try (TensorParallel tp = mlp.filled(mesh).build(); Optimizer optimizer = optimizer(tp, which)) {
            for (int step = 0; step < 4; ++step) {
                final double loss = step(tp, mlp);
                found.add(new double[] {loss, optimizer.clipGradNorm(0.5)});
                optimizer.step();
            }
            for (String name : tp.names()) {
                final int dim = tp.cut(name);
                final Tensor whole = Tensor.zeros(DType.F64, tp.shape(name));
                if (dim < 0) {
                    tp.enter(tp.slice(name), whole);
                } else {
                    tp.gather(tp.slice(name), dim, whole);
                }
                found.add(values(whole));
            }
        }
        return found;
    }

    @Test
    void optimizersStepOnSlicesAsOnTheWhole() throws Exception {
        final Mlp mlp = new Mlp(13);
        for (String which : List.of("sgd", "adam", "adamW", "adagrad", "lion", "lamb")) {
            final AtomicReference<List<double[]>> alone = new AtomicReference<>();
            onMesh(1, (mesh, rank) -> alone.set(train(mesh, mlp, which)));
            assertTrue(alone.get().get(3)[0] < alone.get().get(0)[0], which + " learns something");
            onMesh(3, (mesh, rank) -> {
                final List<double[]> together = train(mesh, mlp, which);
                for (int i = 0; i < together.size(); ++i) {
                    assertArrayEquals(alone.get().get(i), together.get(i), 1e-10, which + " " + i);
                }
            });
        }
    }

    @Test
    void checkpointsAreLoadedByAnyNumberOfRanks() throws Exception {
        final Mlp mlp = new Mlp(13);
        final Map<Integer, double[]> losses = new ConcurrentHashMap<>(); // of 3 steps from the second on
        Ranks.run(2, comm -> {
            try (Mesh mesh = Mesh.over(comm).dim("tp", 2).build(); TensorParallel tp = mlp.filled(mesh).build();
                    Optimizer optimizer = optimizer(tp, "adamW"); Saver saver = Saver.at(comm, root).open()) {
                step(tp, mlp);
                optimizer.step();
                saver.save(1, State.of("model", tp).with("optim", optimizer));
                losses.put(2, threeSteps(tp, optimizer, mlp));
            }
        });
        for (int size : new int[] {1, 3}) {
            Ranks.run(size, comm -> {
                try (Mesh mesh = Mesh.over(comm).dim("tp", size).build(); TensorParallel tp = mlp.deferred(mesh).build();
                        Optimizer optimizer = optimizer(tp, "adamW"); Saver saver = Saver.at(comm, root).open()) {
                    assertArrayEquals(new double[OUT], values(tp.slice("fc2.bias")));
                    final State state = State.of("model", tp).with("optim", optimizer);
                    assertEquals(1, saver.resume(state));
                    assertEquals(1, optimizer.steps());
                    assertArrayEquals(new long[] {13, IN}, state.gather(comm, "model.fc1.weight", -1).shape());
                    losses.put(size, threeSteps(tp, optimizer, mlp));
                }
            });
            assertArrayEquals(losses.get(2), losses.get(size), 1e-9, size + " ranks");
        }
        try (Checkpoint checkpoint = Checkpoint.open(root)) {
            assertArrayEquals(new long[] {OUT, 13}, checkpoint.read("model.fc2.weight").shape());
            assertArrayEquals(new long[] {13, IN}, checkpoint.read("optim.state.fc1.weight.exp_avg").shape());
        }
    }

    private static double[] threeSteps(TensorParallel tp, Optimizer optimizer, Mlp mlp) {
        final double[] losses = new double[3];
        for (int i = 0; i < 3; ++i) {
            losses[i] = step(tp, mlp);
            optimizer.step();
        }
        return losses;
    }

    // --- with ranks that have other rows of the batch

    private static final int STEPS = 3;
    private static final double CLIP = 0.5;

    /** Of the perceptron on one rank after some steps; the norm of each step's gradients goes to `norms`. */
    private static Map<String, double[]> trainedAlone(Mlp mlp, double[] norms) {
        final Params params = mlp.params();
        final Map<String, Tensor> grads = new LinkedHashMap<>();
        mlp.shapes.forEach((name, shape) -> grads.put(name, Tensor.zeros(DType.F64, shape)));
        final Map<String, double[]> now = new LinkedHashMap<>();
        try (Optimizer optimizer = Optimizer.adamW(params, List.copyOf(grads.values())).lr(0.1).build()) {
            for (int i = 0; i < STEPS; ++i) {
                params.names().forEach(name -> now.put(name, values(params.tensors().get(params.names().indexOf(name)))));
                optimizer.zeroGrad();
                new Half(mlp.x, now.get("fc1.weight"), now.get("fc1.bias"), now.get("fc2.weight"))
                        .backward(mlp.dy, (name, grad) -> add(grads.get(name), grad));
                add(grads.get("fc2.bias"), columnSums(mlp.dy, OUT));
                norms[i] = optimizer.clipGradNorm(CLIP);
                optimizer.step();
            }
        }
        params.names().forEach(name -> now.put(name, values(params.tensors().get(params.names().indexOf(name)))));
        return now;
    }

    private void expectTrainedAlone(boolean sharded) throws Exception {
        final Mlp mlp = new Mlp(13);
        final double[] norms = new double[STEPS];
        final Map<String, double[]> expected = trainedAlone(mlp, norms);
        final long[] yShape = {ROWS, OUT};
        Ranks.run(4, comm -> {
            try (Mesh mesh = Mesh.over(comm).dim("dp", 2).dim("tp", 2).build();
                    TensorParallel tp = TensorParallel.over(mesh, "tp").params(mlp.params()).rule("fc1", Style.COLUMN)
                            .rule("fc2", Style.ROW).build()) {
                final int rows = mesh.coordinate("dp"); // these of the batch, uneven ones
                final double[] x = partOf(mlp.x, new long[] {ROWS, IN}, 0, 2, rows);
                final double[] dy = partOf(mlp.dy, yShape, 0, 2, rows);
                Params slices = Params.of(Map.of());
                for (String name : tp.names()) {
                    slices = slices.and(name, tp.slice(name));
                }
                final Comm others = mesh.comm("dp");
                final Params all = slices;
                try (Ddp ddp = sharded ? null
                                : Ddp.create(others, all, new DdpOptions().op(ReduceOp.SUM).tp(tp));
                        Fsdp fsdp = !sharded ? null : Fsdp.create(others, List.of(FsdpUnit.of("all", all)),
                                new FsdpOptions().op(ReduceOp.SUM).tp(tp));
                        Optimizer optimizer = (sharded ? Optimizer.adamW(fsdp) : Optimizer.adamW(ddp)).lr(0.1).build();
                        Saver saver = Saver.at(comm, root).open()) {
                    for (int i = 0; i < STEPS; ++i) {
                        if (sharded) {
                            passes(tp, fsdp, x, dy);
                        } else {
                            ddp.zeroGrad();
                            half(tp, x).backward(dy, (name, grad) -> add(ddp.gradTensor(tp.names().indexOf(name)), grad));
                            add(ddp.gradTensor(3), columnSums(dy, OUT));
                            ddp.readyAll();
                            ddp.await();
                        }
                        assertEquals(norms[i], optimizer.clipGradNorm(CLIP), NEAR); // of all parameters
                        optimizer.step();
                    }
                    saver.save(STEPS, (sharded ? State.of("model", fsdp) : State.of("model", ddp)).with("optim", optimizer));
                    try (Fsdp.Pass pass = sharded ? fsdp.forward(0) : null) {
                        expected.forEach((name, whole) -> {
                            final int dim = tp.cut(name);
                            near(dim < 0 ? whole : partOf(whole, mlp.shapes.get(name), dim, 2, mesh.coordinate("tp")),
                                    values(sharded ? pass.paramTensor(name) : tp.slice(name)), name);
                        });
                    }
                }
            }
        });
        try (Checkpoint checkpoint = Checkpoint.open(root)) {
            expected.forEach((name, whole) -> near(whole, values(checkpoint.read("model." + name)), name));
            assertArrayEquals(new long[] {13, IN}, checkpoint.read("optim.state.fc1.weight.exp_avg").shape());
        }
    }

    /** The forward and backward pass over an FSDP model of slices. */
    private static void passes(TensorParallel tp, Fsdp fsdp, double[] x, double[] dy) {
        final Half half;
        try (Fsdp.Pass pass = fsdp.forward("all")) {
            half = new Half(x, values(pass.paramTensor("fc1.weight")), values(pass.paramTensor("fc1.bias")),
                    values(pass.paramTensor("fc2.weight")));
            final long[] shape = {dy.length / OUT, OUT};
            final Tensor without = Tensor.copyOf(half.y, shape);
            tp.leave(without, without);
            final Tensor with = Tensor.copyOf(half.y, shape);
            tp.leave(with, with, pass.paramTensor("fc2.bias")); // it is read-only
            near(plus(values(without), values(pass.paramTensor("fc2.bias"))), values(with), "y");
            refused("read-only", IllegalArgumentException.class,
                    () -> tp.leaveAsync(with, with, pass.paramTensor("fc2.bias")));
        }
        try (Fsdp.Pass pass = fsdp.backward("all")) {
            half.backward(dy, (name, grad) -> pass.gradTensor(name).doubles().put(grad));
            pass.gradTensor("fc2.bias").doubles().put(columnSums(dy, OUT));
            pass.ready();
        }
        fsdp.await();
    }

    @Test
    void ddpOverSlicesIsOneRank() throws Exception {
        expectTrainedAlone(false);
    }

    @Test
    void fsdpOverSlicesIsOneRank() throws Exception {
        expectTrainedAlone(true);
    }

    @Test
    void closingATensorParallelModelClosesThoseOverItsSlices() throws Exception {
        onMesh(1, (mesh, rank) -> {
            final TensorParallel tp = new Mlp(8).deferred(mesh).build();
            final Comm one = Mesh.over(mesh.comm("tp")).dim("dp", 1).build().comm("dp");
            final Params slices = Params.of("fc1.weight", tp.slice("fc1.weight"));
            final DdpOptions options = new DdpOptions().tp(tp);
            final Ddp ddp = Ddp.create(one, slices, options);
            final Fsdp fsdp = Fsdp.create(one, List.of(FsdpUnit.of("u", slices)), new FsdpOptions().tp(tp));
            final Optimizer optimizer = Optimizer.sgd(ddp).build();
            tp.close();
            for (NativeObject closed : List.of(ddp, fsdp, optimizer)) {
                assertTrue(closed.isClosed(), closed.getClass().getName());
            }
            refused("this Ddp is closed: the TensorParallel", IllegalStateException.class, ddp::zeroGrad);
            refused("this TensorParallel is closed", IllegalStateException.class, () -> Ddp.create(one, slices, options));
        });
    }

    @Test
    void slicesOfAnotherModelAreRefused() throws Exception {
        onMesh(1, (mesh, rank) -> {
            try (TensorParallel tp = new Mlp(8).deferred(mesh).build()) {
                final Params others = Params.of("other", Tensor.zeros(DType.F64, 2));
                refused("other", TesseraInvalidArgumentException.class,
                        () -> Ddp.create(mesh.comm("tp"), others, new DdpOptions().tp(tp)));
                refused("other", TesseraInvalidArgumentException.class, () -> Fsdp.create(mesh.comm("tp"),
                        List.of(FsdpUnit.of("u", others)), new FsdpOptions().tp(tp)));
            }
        });
    }

    @Test
    void shardsOfFsdpAreNotCut() throws Exception {
        onMesh(2, (mesh, rank) -> {
            final Tensor whole = Tensor.zeros(DType.F64, 4, 2);
            try (Fsdp fsdp = Fsdp.create(mesh.comm("tp"), List.of(FsdpUnit.of("fc1", Params.of("fc1.weight", whole))))) {
                final Params shards = Params.of("fc1.weight", fsdp.shardTensor(0));
                refused("\"fc1.weight\" is a shard of an FSDP model: create the tensor-parallel model first",
                        TesseraInvalidArgumentException.class,
                        () -> TensorParallel.over(mesh).params(shards).rule("fc1", Style.COLUMN).build());
                TensorParallel.over(mesh).params(Params.of("fc1.weight", whole)).rule("fc1", Style.COLUMN).build().close();
            }
        });
    }

    @Test
    void anOptimizerRefusesGradientsThatWereNotSummed() throws Exception {
        onMesh(2, (mesh, rank) -> {
            try (TensorParallel tp = TensorParallel.over(mesh).rule("norm", Style.SEQUENCE)
                    .deferred("norm.weight", DType.F64, 2).build();
                    Optimizer sgd = Optimizer.sgd(tp).lr(1).build()) {
                tp.grad("norm.weight").doubles().put(0, 1);
                final String early = assertThrows(TesseraInvalidStateException.class, sgd::step).getMessage();
                assertTrue(early.contains("norm.weight") && early.contains("call sum_grads before you clip or step"), early);
                tp.sumGradsAsync().await();
                sgd.step();
                assertArrayEquals(new double[] {-2, 0}, values(tp.slice("norm.weight")));
                assertThrows(TesseraInvalidStateException.class, sgd::step);
            }
        });
    }

    // --- work in the background

    @Test
    void asynchronousCallsComputeTheSame() throws Exception {
        onMesh(2, (mesh, rank) -> {
            try (TensorParallel tp = TensorParallel.over(mesh).rule("tok", Style.VOCABULARY)
                    .params(Params.of("tok.weight", Tensor.copyOf(random(1, 6), 3, 2))).build()) {
                final double[] given = {1 + rank, 2, 3, 4, 5, 6};
                final Function<double[], Tensor> rows = all -> Tensor.copyOf(all, all.length / 2, 2);
                final double[] sum = {3, 4, 6, 8, 10, 12};
                final double[] ownSum = rank == 0 ? new double[] {3, 4, 6, 8} : new double[] {10, 12};
                final double[] own = rank == 0 ? new double[] {1, 2, 3, 4} : new double[] {5, 6};
                final Tensor bias = Tensor.copyOf(new double[] {10, 20});
                final List<Work> works = new ArrayList<>();
                final List<double[]> expected = new ArrayList<>();
                final List<Tensor> found = new ArrayList<>();
                final BiConsumer<double[], Function<Tensor, Work>> begin = (result, call) -> {
                    final Tensor out = Tensor.zeros(DType.F64, result.length / 2, 2);
                    works.add(call.apply(out));
                    expected.add(result);
                    found.add(out);
                };
                final double[] whole = {1, 2, 3, 4, 5, 6};
                begin.accept(given, out -> tp.enterAsync(rows.apply(given), out));
                begin.accept(whole, out -> tp.enterAsync(rows.apply(own), 0, out));
                begin.accept(sum, out -> tp.enterBackwardAsync(rows.apply(given), out));
                begin.accept(ownSum, out -> tp.enterBackwardAsync(rows.apply(given), 0, out));
                begin.accept(sum, out -> tp.leaveAsync(rows.apply(given), out));
                begin.accept(plus(sum, new double[] {10, 20}), out -> tp.leaveAsync(rows.apply(given), out, bias));
                begin.accept(ownSum, out -> tp.leaveAsync(rows.apply(given), 0, out));
                begin.accept(plus(ownSum, new double[] {10, 20}), out -> tp.leaveAsync(rows.apply(given), 0, out, bias));
                begin.accept(given, out -> tp.leaveBackwardAsync(rows.apply(given), out));
                begin.accept(whole, out -> tp.leaveBackwardAsync(rows.apply(own), 0, out));
                begin.accept(whole, out -> tp.gatherAsync(rows.apply(own), 0, out));
                final double[] words = random(1, 6);
                final Tensor ids = longs(new long[] {3}, 2, 0, 1);
                final double[] looked = {words[4], words[5], words[0], words[1], words[2], words[3]};
                begin.accept(looked, out -> tp.embedAsync("tok.weight", ids, out));
                begin.accept(partOf(looked, new long[] {3, 2}, 0, 2, rank), out -> tp.embedAsync("tok.weight", ids, 0, out));
                System.gc(); // nothing that is in use goes
                for (int i = 0; i < works.size(); ++i) {
                    works.get(i).await();
                    near(expected.get(i), values(found.get(i)), "call " + i);
                }
                works.add(tp.embedBackwardAsync("tok.weight", ids, rows.apply(whole)));
                works.add(tp.embedBackwardAsync("tok.weight", ids, rows.apply(own), 0));
                works.add(tp.sumGradsAsync());
                works.get(works.size() - 1).toFuture().get();
                near(partOf(new double[] {6, 8, 10, 12, 2, 4}, new long[] {3, 2}, 0, 2, rank), values(tp.grad("tok.weight")),
                        "gradients of words");
                final Tensor logits = Tensor.copyOf(partOf(words, new long[] {2, 3}, 1, 2, rank), 2, rank == 0 ? 2 : 1);
                final Tensor targets = longs(new long[] {2}, 2, 0);
                final Tensor mean = Tensor.zeros(DType.F64);
                final Tensor[] total = {Tensor.zeros(DType.F64), Tensor.zeros(DType.F64)};
                try (Work first = tp.crossEntropyAsync(logits, targets, 3, mean, null);
                        Work second = tp.crossEntropyAsync(logits, targets, 3, total[0], null,
                                new CrossEntropyOptions().reduction(Reduction.SUM))) {
                    second.await();
                    assertTrue(first.isDone());
                    assertNull(first.error());
                }
                tp.crossEntropy(logits, targets, 3, total[1], null, new CrossEntropyOptions().reduction(Reduction.SUM));
                assertEquals(total[1].doubles().get(0), total[0].doubles().get(0));
                assertEquals(mean.doubles().get(0), total[0].doubles().get(0) / 2, NEAR);
            }
        });
    }

    @Test
    void aModelClosedUnderAnOperationIsFreedWhenThatIsDone() throws Exception {
        Ranks.runStores(2, (store, rank) -> {
            try (Comm comm = Comm.create(store, rank, 2, Ranks.options());
                    Mesh mesh = Mesh.over(comm).dim("tp", 2).build()) {
                final TensorParallel tp =
                        TensorParallel.over(mesh).deferred("n", DType.F64, 4).rule("n", Style.SEQUENCE).build();
                tp.grad("n").doubles().put(0, 1 + rank);
                if (rank == 1) {
                    store.await("closed");
                    tp.sumGrads();
                    tp.close();
                    return;
                }
                Tensor grad = tp.grad("n");
                final Work work = tp.sumGradsAsync(); // writes memory of the model
                tp.close();
                assertThrows(IllegalStateException.class, tp::sumGrads);
                System.gc();
                assertFalse(tp.ref.isDestroyed(), "freed while the library may write to it");
                store.set("closed", new byte[0]);
                work.await();
                assertEquals(3, grad.doubles().get(0));
                System.gc();
                assertFalse(tp.ref.isDestroyed(), "the view would point at nothing");
                grad = null;
                Ranks.collectUntil("it is freed in the end", tp.ref::isDestroyed);
            }
        });
    }

    @Test
    void closingTheMeshEndsWhatIsInFlight() throws Exception {
        Ranks.runStores(2, (store, rank) -> {
            try (Comm comm = Comm.create(store, rank, 2, Ranks.options())) {
                final Mesh mesh = Mesh.over(comm).dim("tp", 2).build();
                final TensorParallel tp = TensorParallel.over(mesh, "tp").deferred("w", DType.F64, 4).build();
                if (rank == 1) { // takes no part
                    store.await("done");
                    mesh.close();
                    assertTrue(tp.isClosed() && tp.ref.isDestroyed() && mesh.ref.isDestroyed());
                    return;
                }
                final Tensor one = Tensor.copyOf(new double[] {1});
                final Work work = tp.leaveAsync(one, one);
                final AtomicReference<Throwable> thrown = new AtomicReference<>();
                final Thread caller = new Thread(() -> {
                    try {
                        tp.leave(one, one);
                    } catch (Throwable error) {
                        thrown.set(error);
                    }
                });
                caller.start();
                Ranks.eventually("the call has begun", () -> Ranks.isBusy(tp));
                final String twice = assertThrows(IllegalStateException.class, () -> tp.leave(one, one)).getMessage();
                assertTrue(twice.contains("only one thread may use it"), twice);
                mesh.close();
                caller.join(Patience.millis(10_000));
                assertFalse(caller.isAlive());
                assertEquals(TesseraAbortedException.class, thrown.get().getClass(), () -> String.valueOf(thrown.get()));
                assertThrows(TesseraAbortedException.class, work::await);
                Ranks.eventually("all is freed", () -> tp.ref.isDestroyed() && mesh.ref.isDestroyed());
                store.set("done", new byte[0]);
            }
        });
    }

    @Test
    void anInterruptEndsACall() throws Exception {
        Ranks.runStores(2, (store, rank) -> {
            try (Comm comm = Comm.create(store, rank, 2, Ranks.options());
                    Mesh mesh = Mesh.over(comm).dim("tp", 2).build();
                    TensorParallel tp = TensorParallel.over(mesh).deferred("w", DType.F64, 4).build()) {
                if (rank == 1) { // takes no part
                    store.await("done");
                    return;
                }
                final Tensor one = Tensor.copyOf(new double[] {1});
                final Work work = tp.leaveAsync(one, one); // which the next call waits for
                final AtomicReference<Throwable> thrown = new AtomicReference<>();
                final Thread caller = new Thread(() -> {
                    try {
                        tp.sumGrads();
                        tp.leave(one, one);
                    } catch (Throwable error) {
                        thrown.set(error);
                    }
                });
                caller.start();
                Ranks.eventually("the call has begun", () -> Ranks.isBusy(tp));
                caller.interrupt();
                caller.join(Patience.millis(10_000));
                assertFalse(caller.isAlive());
                assertEquals(TesseraInterruptedException.class, thrown.get().getClass(), () -> String.valueOf(thrown.get()));
                assertFalse(work.isDone());
                store.set("done", new byte[0]);
            }
        });
    }

    @Test
    void theCpuHasNoStreams() throws Exception {
        onMesh(1, (mesh, rank) -> {
            try (TensorParallel tp = new Mlp(3).filled(mesh).build()) {
                tp.setStream(0);
                assertThrows(TesseraInvalidArgumentException.class, () -> tp.setStream(1));
            }
        });
    }

    // --- closing

    @Test
    void closingAModelClosesWhatWasMadeFromIt() throws Exception {
        onMesh(1, (mesh, rank) -> {
            final TensorParallel tp = new Mlp(3).filled(mesh).build();
            final Optimizer optimizer = Optimizer.adamW(tp).build();
            final State state = State.of("model", tp).with("optim", optimizer);
            tp.close();
            tp.close();
            assertTrue(optimizer.ref.isDestroyed() && state.ref.isDestroyed() && tp.ref.isDestroyed());
            final String message = assertThrows(IllegalStateException.class, optimizer::step).getMessage();
            assertTrue(message.contains("TensorParallel that it belongs to was closed"), message);
            final Tensor one = Tensor.zeros(DType.F64, 1);
            for (Executable call : List.<Executable>of(tp::names, () -> tp.slice("fc1.bias"), () -> tp.grad("fc1.bias"),
                    () -> tp.layout("fc1.bias"), () -> tp.part(1), () -> tp.leave(one, one), () -> tp.split(one, 0, one),
                    tp::zeroGrad, tp::sumGradsAsync, () -> State.of("m", tp), () -> Optimizer.sgd(tp).build())) {
                final String closed = assertThrows(IllegalStateException.class, call).getMessage();
                assertTrue(closed.contains("this TensorParallel is closed"), closed);
            }
            assertTrue(tp.toString().contains("fc1.bias"), tp.toString());
            final TensorParallel other = new Mlp(3).filled(mesh).build();
            Tensor slice = other.slice("fc1.bias");
            mesh.close();
            final String closed = assertThrows(IllegalStateException.class, other::names).getMessage();
            assertTrue(closed.contains("Mesh that it belongs to was closed"), closed);
            assertEquals(new Mlp(3).values.get("fc1.bias")[2], slice.doubles().get(2));
            slice = null;
            Ranks.collectUntil("the mesh is freed with the last view", mesh.ref::isDestroyed);
            assertThrows(IllegalStateException.class, () -> new Mlp(3).filled(mesh).build());
        });
    }

    @Test
    void objectsMayBeClosedInAnyOrder() throws Exception {
        for (int order = 0; order < 24; ++order) {
            final int which = order;
            Ranks.runStores(1, (store, rank) -> {
                final Comm comm = Comm.create(store, 0, 1, Ranks.options());
                final Mesh mesh = Mesh.over(comm).dim("tp", 1).build();
                final TensorParallel tp = new Mlp(3).filled(mesh).build();
                final Optimizer optimizer = Optimizer.adamW(tp).build();
                final Tensor bias = tp.slice("fc2.bias");
                final Work work = tp.leaveAsync(bias, bias);
                final List<NativeObject> open = new ArrayList<>(List.of(comm, mesh, tp, optimizer));
                for (int left = 4, rest = which; left > 0; rest /= left, --left) {
                    open.remove(rest % left).close();
                    try {
                        step(tp, new Mlp(3));
                        optimizer.step();
                        tp.sumGradsAsync().await();
                    } catch (IllegalStateException | TesseraException closed) {
                        // Which of them it is depends on the order.
                    }
                }
                Ranks.eventually("the work is done", work::isDone); // or aborted with the mesh
                assertTrue(Double.isFinite(bias.doubles().get(0)));
                assertTrue(tp.isClosed() && optimizer.ref.isDestroyed());
            });
        }
    }

    @Test
    void whatIsForgottenIsFreed() throws Exception {
        onMesh(1, (mesh, rank) -> {
            final Ref ref = forget(mesh);
            Ranks.collectUntil("it is freed", ref::isDestroyed);
        });
    }

    private static Ref forget(Mesh mesh) {
        final TensorParallel tp = new Mlp(3).filled(mesh).build();
        assertNotEquals(tp.slice("fc1.bias").address(), tp.grad("fc1.bias").address());
        return tp.ref;
    }

    // --- mistakes

    private static void refused(String said, Class<? extends Throwable> type, Executable call) {
        final String message = assertThrows(type, call, said).getMessage();
        assertTrue(message.contains(said), message);
    }

    @Test
    void activationsEnterAndLeavePartByPart() throws Exception {
        onMesh(2, (mesh, rank) -> {
            try (TensorParallel tp = new Mlp(8).filled(mesh).build()) {
                for (int dim = 0; dim < 2; ++dim) {
                    final Tensor whole = Tensor.copyOf(new double[] {1, 2, 3, 4}, 2, 2);
                    final Tensor mine = dim == 0 ? Tensor.zeros(DType.F64, 1, 2) : Tensor.zeros(DType.F64, 2, 1);
                    tp.split(whole, dim, mine);
                    final Tensor out = Tensor.zeros(DType.F64, 2, 2);
                    final List<Long> seen = new ArrayList<>();
                    final List<Tensor> kept = new ArrayList<>();
                    tp.enterParts(mine, dim, out, (from, part) -> {
                        seen.add(from);
                        kept.add(part);
                        if (from == rank) {
                            assertEquals(mine.doubles().get(1), part.doubles().get(1));
                        }
                        assertTrue(part.doubles().isReadOnly());
                    });
                    assertEquals(List.of(0L, 1L), seen);
                    assertEquals(whole.doubles(), out.doubles());
                    assertThrows(IllegalStateException.class, () -> kept.get(0).doubles());
                    tp.leaveParts(2, dim, mine, (begin, part) -> part.doubles().put(0, begin + 1).put(1, begin + 1));
                    assertEquals(2.0 * (rank + 1), mine.doubles().get(1));
                    final Tensor bias = Tensor.copyOf(dim == 0 ? new double[] {0.5, 0.5} : new double[] {0.5}, 2 - dim);
                    tp.leaveParts(2, dim, mine, bias, (begin, part) -> part.doubles().put(0, begin + 1).put(1, begin + 1));
                    assertEquals(2.0 * (rank + 1) + 0.5, mine.doubles().get(1));
                }
                final Tensor one = Tensor.zeros(DType.F64, 1);
                final Tensor two = Tensor.zeros(DType.F64, 2);
                if (rank == 1) {
                    final TesseraException told = assertThrows(TesseraException.class, () -> tp.enterParts(one, 0, two,
                            (from, part) -> { throw new IllegalArgumentException("no more"); }));
                    assertTrue(told.getCause() instanceof IllegalArgumentException, told.toString());
                } else {
                    tp.enterParts(one, 0, two, (from, part) -> {}); // is unharmed
                }
                assertThrows(NullPointerException.class, () -> tp.enterParts(one, 0, two, null));
                final Class<? extends TesseraException> ends = rank == 1 ? TesseraException.class : TesseraAbortedException.class;
                assertThrows(ends, () -> tp.leaveParts(2, 0, one, (begin, part) -> {
                    if (rank == 1) {
                        throw new java.io.IOException("no more");
                    }
                }));
            }
        });
    }

    @Test
    void badPlansAreRefusedOnAllRanks() throws Exception {
        final Map<String, Map<String, Style>> bad = new LinkedHashMap<>();
        bad.put("\"fc3\"", Map.of("fc3", Style.COLUMN));
        bad.put("several patterns", new LinkedHashMap<>(Map.of("fc1", Style.COLUMN, "fc?", Style.ROW)));
        bad.put("has no dimension 2", Map.of("fc1.weight", Style.shard(2)));
        bad.put("has no dimension -1", Map.of("fc1.weight", Style.shard(-1)));
        bad.put("needs 2", Map.of("fc1.bias", Style.VOCABULARY));
        bad.put("1 heads do not divide over 2 ranks", Map.of("fc1.weight", Style.COLUMN.heads(1)));
        bad.put("do not divide into 3 heads", Map.of("fc1.weight", Style.shard(0).heads(3)));
        assertThrows(IllegalArgumentException.class, () -> Style.ROW.heads(0));
        assertThrows(IllegalArgumentException.class, () -> Style.SEQUENCE.heads(2));
        final Layout layout = Layout.of(new long[] {8, IN}, new int[] {3}, Placement.shard(0));
        bad.put("over 3 ranks", Map.of("fc1.weight", Style.layout(layout)));
        onMesh(2, (mesh, rank) -> {
            final Mlp mlp = new Mlp(8);
            bad.forEach((said, plan) -> {
                refused(said, TesseraInvalidArgumentException.class,
                        () -> TensorParallel.over(mesh).params(mlp.params()).plan(plan).build());
                // Of one rank alone it is an error of all.
                final TensorParallel.Builder builder = TensorParallel.over(mesh).params(mlp.params());
                final TensorParallel.Builder mixed = rank == 1 ? builder.plan(plan) : builder;
                final String told = assertThrows(TesseraInvalidArgumentException.class, mixed::build).getMessage();
                assertTrue(told.contains(said) && (rank == 1 || told.contains("rank 1")), told);
            });
            final Style second = rank == 1 ? Style.REPLICATE : Style.ROW;
            final String differ = assertThrows(TesseraMismatchException.class, () -> TensorParallel.over(mesh)
                    .params(mlp.params()).rule("fc1", Style.COLUMN).rule("fc2", second).build()).getMessage();
            assertTrue(differ.contains("rank 1") && differ.contains("fc2.weight"), differ);
            assertThrows(TesseraInvalidArgumentException.class, () -> TensorParallel.over(mesh).build());
            new Mlp(8).filled(mesh).build().close(); // nothing is out of use
        });
        layout.close();
        onMesh(1, (mesh, rank) -> {
            refused("this Layout is closed", IllegalStateException.class, () -> TensorParallel.over(mesh)
                    .deferred("w", DType.F64, 8, IN).rule("w", Style.layout(layout)).build());
            final TensorParallel.Builder builder = TensorParallel.over(mesh).deferred("w", DType.F64, 2);
            refused("two parameters are named \"w\"", IllegalArgumentException.class,
                    () -> builder.params(Params.of("w", Tensor.zeros(DType.F64, 2))));
            refused("parameter \"v\": the shape [-1]", IllegalArgumentException.class,
                    () -> builder.deferred("v", DType.F64, -1));
            refused("pattern contains a NUL", IllegalArgumentException.class, () -> builder.rule("a\0", Style.ROW));
            for (Executable call : List.<Executable>of(() -> TensorParallel.over(null),
                    () -> TensorParallel.over(mesh, null), () -> builder.params(null),
                    () -> builder.deferred("v", null, 2), () -> builder.rule(null, Style.ROW), () -> builder.rule("w", null), () -> builder.plan(null), () -> builder.options(null),
                    () -> Style.layout(null))) {
                assertThrows(NullPointerException.class, call);
            }
        });
    }

    @Test
    void badActivationsAreRefusedBeforeAnythingIsSent() throws Exception {
        onMesh(2, (mesh, rank) -> {
            final Mlp mlp = new Mlp(8);
            try (TensorParallel tp = TensorParallel.over(mesh).params(mlp.params())
                    .params(Params.of("tok", Tensor.zeros(DType.F64, 3, 2))).rule("tok", Style.VOCABULARY).build()) {
                final Tensor y = Tensor.zeros(DType.F64, 6, 4);
                final Class<TesseraInvalidArgumentException> wrong = TesseraInvalidArgumentException.class;
                refused("the shapes differ", wrong, () -> tp.leave(y, Tensor.zeros(DType.F64, 4, 6)));
                refused("the dtypes differ", wrong, () -> tp.leave(y, Tensor.zeros(DType.F32, 6, 4)));
                refused("so its part must be [3, 4]", wrong, () -> tp.leave(y, 0, y));
                refused("so its part must be [3, 4]", wrong, () -> tp.split(y, 0, y));
                refused("there is no dimension 2", wrong, () -> tp.gather(y, 2, y));
                refused("the last dimension's 4 elements", wrong, () -> tp.leave(y, y, Tensor.zeros(DType.F64, 5)));
                refused("the shapes differ", wrong, () -> tp.leaveAsync(y, Tensor.zeros(DType.F64, 4, 6)));
                refused("dim is -1; it must be at least 0", IllegalArgumentException.class, () -> tp.enter(y, -1, y));
                refused("a size is -1", IllegalArgumentException.class, () -> tp.part(-1));
                refused("no parameter \"fc9\"; known: [fc1.weight", IllegalArgumentException.class, () -> tp.slice("fc9"));
                refused("no parameter \"fc9\"", IllegalArgumentException.class, () -> tp.embed("fc9", y, y));
                final Tensor out = Tensor.zeros(DType.F64, 2, 2);
                refused("id 3 at position 1", wrong, () -> tp.embed("tok", longs(new long[] {2}, 0, 3), out));
                refused("ids are f64", wrong, () -> tp.embed("tok", Tensor.zeros(DType.F64, 2), out));
                refused("not an embedding", wrong, () -> tp.embed("fc1.bias", longs(new long[] {2}, 0, 1), out));
                final Tensor logits = Tensor.zeros(DType.F64, 2, 2);
                final Tensor loss = Tensor.zeros(DType.F64);
                final Tensor targets = longs(new long[] {2}, 0, 4);
                refused("target 4 of row 1", wrong, () -> tp.crossEntropy(logits, targets, 4, loss, null));
                refused("rank " + rank + " of 2 must be [2, " + (4 - rank) + "]", wrong,
                        () -> tp.crossEntropy(logits, targets, 7, loss, null));
                refused("the loss is f32", wrong, () -> tp.crossEntropy(logits, targets, 4, Tensor.zeros(DType.F32), null));
                refused("label_smoothing is 2", wrong, () -> tp.crossEntropy(logits, targets, 4, loss, null,
                        new CrossEntropyOptions().labelSmoothing(2)));
                refused("class weights are f64 [3]", wrong, () -> tp.crossEntropy(logits, longs(new long[] {2}, 0, 1), 4,
                        loss, null, new CrossEntropyOptions().classWeights(Tensor.zeros(DType.F64, 3))));
                for (Executable call : List.<Executable>of(() -> tp.leave(null, y), () -> tp.leave(y, null),
                        () -> tp.leave(y, y, null), () -> tp.leave(y, 0, y, null), () -> tp.enterAsync(null, y),
                        () -> tp.split(null, 0, y), () -> tp.slice(null), () -> tp.embed("tok", null, out),
                        () -> tp.crossEntropy(logits, targets, 4, null, null),
                        () -> tp.crossEntropy(logits, targets, 4, loss, null, null),
                        () -> new CrossEntropyOptions().reduction(null), () -> new CrossEntropyOptions().dataRanks(null),
                        () -> State.of("m", (TensorParallel) null), () -> Optimizer.adam((TensorParallel) null))) {
                    assertThrows(NullPointerException.class, call);
                }
                final Tensor one = Tensor.copyOf(new double[] {rank});
                tp.leave(one, one); // the ranks are still together
                assertEquals(1, one.doubles().get(0));
            }
        });
    }

    @Test
    void aTensorOfAPassIsNotWrittenAfterIt() throws Exception {
        Ranks.run(2, comm -> {
            final List<FsdpUnit> units = List.of(FsdpUnit.of("u").andDeferred("w", DType.F64, 4));
            try (Mesh mesh = Mesh.over(comm).dim("tp", 2).build(); Fsdp fsdp = Fsdp.create(comm, units);
                    TensorParallel tp = TensorParallel.over(mesh).deferred("x", DType.F64, 4).build()) {
                final Tensor grad;
                try (Fsdp.Pass pass = fsdp.backward("u")) {
                    grad = pass.gradTensor("w");
                    grad.doubles().put(new double[] {1, 2, 3, 4});
                    tp.leaveAsync(grad, grad).await();
                    assertArrayEquals(new double[] {2, 4, 6, 8}, values(grad));
                    refused("read-only", IllegalArgumentException.class, () -> tp.leave(pass.paramTensor("w"), grad));
                    pass.ready();
                }
                fsdp.await();
                assertThrows(IllegalStateException.class, () -> tp.leave(grad, grad));
            }
        });
    }
}
