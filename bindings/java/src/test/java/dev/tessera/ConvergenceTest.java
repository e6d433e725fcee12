package dev.tessera;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertTrue;

import java.nio.FloatBuffer;
import java.util.ArrayList;
import java.util.Collections;
import java.util.List;
import java.util.Random;
import org.junit.jupiter.api.Test;

/** Whole trainings: ranks with a share of the batch equal one rank with all of it, however the gradients are reduced. */
class ConvergenceTest {
    private static final int STEPS = 50;
    private static final int SAMPLES = 24;
    private static final int IN = 5;
    private static final int HIDDEN = 8;

    /** How a training reduces its gradients. */
    private static final class Way {
        final DdpOptions options;
        int microSteps = 1; // parts of a rank's share of the batch, of which the last one synchronises
        boolean byHand; // backward reduces nothing; the trainer averages what it left
        boolean inBackward; // the optimizer steps within await
        double near = 1e-4;
        Boolean bitsOfPlain; // null: perhaps

        Way(DdpOptions options) {
            this.options = options;
        }
    }

    /** A network with one hidden layer of tanh on a fixed regression problem. */
    private static final class Regression {
        final float[][] inputs = new float[SAMPLES][IN];
        final float[] targets = new float[SAMPLES];
        Params params;

        Regression() {
            final Random random = new Random(5);
            for (int s = 0; s < SAMPLES; ++s) {
                targets[s] = uniform(random);
                for (int k = 0; k < IN; ++k) {
                    inputs[s][k] = uniform(random);
                }
            }
            params = Params.of("w1", initial(random, HIDDEN, IN)).and("b1", initial(random, HIDDEN))
                    .and("w2", initial(random, HIDDEN));
        }

        private static float uniform(Random random) {
            return 2 * random.nextFloat() - 1;
        }

        private static Tensor initial(Random random, long... shape) {
            final Tensor tensor = Tensor.zeros(DType.F32, shape);
            for (int i = 0; i < tensor.numel(); ++i) {
                tensor.floats().put(i, uniform(random) / 2);
            }
            return tensor;
        }

        /** The hidden activations, and the error of the prediction behind them. */
        private float[] forward(int s) {
            final FloatBuffer w1 = value(0);
            final float[] out = new float[HIDDEN + 1];
            out[HIDDEN] = -targets[s];
            for (int j = 0; j < HIDDEN; ++j) {
                float sum = value(1).get(j);
                for (int k = 0; k < IN; ++k) {
                    sum += w1.get(j * IN + k) * inputs[s][k];
                }
                out[j] = (float) Math.tanh(sum);
                out[HIDDEN] += value(2).get(j) * out[j];
            }
            return out;
        }

        private FloatBuffer value(int param) {
            return params.tensors().get(param).floats();
        }

        /** Adds the gradients of the mean over {@code share} samples, of every {@code stride}-th one. */
        void backward(Ddp ddp, int first, int stride, float share) {
            for (int s = first; s < SAMPLES; s += stride) {
                final float[] h = forward(s);
                final float d = 2 * h[HIDDEN] / share;
                for (int j = 0; j < HIDDEN; ++j) {
                    final float dh = d * value(2).get(j) * (1 - h[j] * h[j]);
                    add(ddp.grad(2), j, d * h[j]);
                    add(ddp.grad(1), j, dh);
                    for (int k = 0; k < IN; ++k) {
                        add(ddp.grad(0), j * IN + k, dh * inputs[s][k]);
                    }
                }
            }
        }

        private static void add(FloatBuffer to, int index, float value) {
            to.put(index, to.get(index) + value);
        }

        /** The mean over all samples. */
        double loss() {
            double sum = 0;
            for (int s = 0; s < SAMPLES; ++s) {
                sum += Math.pow(forward(s)[HIDDEN], 2);
            }
            return sum / SAMPLES;
        }
    }

    /** The loss of all samples after each step, then the parameters. */
    private static List<Double> train(Comm comm, Way way) {
        final Regression problem = new Regression();
        final int world = comm.worldSize();
        final List<Double> result = new ArrayList<>();
        try (Ddp ddp = Ddp.create(comm, problem.params, way.options);
                Optimizer sgd = Optimizer.sgd(ddp).lr(0.05).momentum(0.9).build()) {
            problem.params = ddp.params();
            for (int step = 0; step < STEPS; ++step) {
                ddp.zeroGrad();
                for (int micro = 0; micro < way.microSteps; ++micro) {
                    ddp.setSync(micro + 1 == way.microSteps);
                    problem.backward(ddp, comm.rank() + world * micro, world * way.microSteps, (float) SAMPLES / world);
                    for (int i = 2; i >= 0; --i) {
                        ddp.ready(i);
                    }
                    ddp.await();
                }
                for (int i = 0; way.byHand && i < 3; ++i) {
                    comm.allReduce(ddp.gradTensor(i), ReduceOp.AVG);
                }
                if (!way.inBackward) {
                    sgd.step();
                }
                result.add(problem.loss());
            }
            for (Tensor tensor : problem.params.tensors()) {
                for (int i = 0; i < tensor.numel(); ++i) {
                    result.add((double) tensor.floats().get(i));
                }
            }
        }
        return result;
    }

    /** All ranks have the same bits. */
    private static List<Double> train(int world, Way way) throws Exception {
        final List<List<Double>> results = Collections.synchronizedList(new ArrayList<>());
        Ranks.run(world, comm -> results.add(train(comm, way)));
        assertEquals(Collections.nCopies(world, results.get(0)), results, "ranks ended with different bits");
        return results.get(0);
    }

    /** With a parameter a bucket. */
    private static DdpOptions smallBuckets() {
        return new DdpOptions().bucketBytes(64).firstBucketBytes(64);
    }

    private static void expectWorldSizeDoesNotMatter(Way way) throws Exception {
        final List<Double> alone = train(1, new Way(new DdpOptions()));
        assertTrue(alone.get(STEPS - 1) < 0.8 * alone.get(0), "it learns something");
        for (int world = 2; world <= 3; ++world) {
            final List<Double> together = train(world, way);
            for (int step = 0; step < STEPS; ++step) {
                assertEquals(alone.get(step), together.get(step), way.near * alone.get(step),
                        world + " ranks, step " + step);
            }
            assertEquals(together, train(world, way), "a second run gave other bits");
            if (way.bitsOfPlain != null) {
                assertEquals(way.bitsOfPlain, train(world, new Way(smallBuckets())).equals(together),
                        world + " ranks: the plain way's bits");
            }
        }
    }

    @Test
    void ranksWithAShareOfTheBatchEqualOneRankWithAllOfIt() throws Exception {
        expectWorldSizeDoesNotMatter(new Way(smallBuckets()));
    }

    @Test
    void gradientsAddedUpInMicroStepsEqualOneRankWithAllOfIt() throws Exception {
        final Way way = new Way(smallBuckets());
        way.microSteps = 2;
        expectWorldSizeDoesNotMatter(way);
    }

    @Test
    void gradientsAveragedByHandEqualOneRankWithAllOfIt() throws Exception {
        final Way way = new Way(smallBuckets().hook(DdpOptions.Hook.NOOP));
        way.byHand = true;
        expectWorldSizeDoesNotMatter(way);
    }

    @Test
    void gradientsReducedInBf16ComeCloseToOneRankWithAllOfIt() throws Exception {
        final Way way = new Way(smallBuckets().reduceDtype(DType.BF16));
        way.near = 2e-2;
        way.bitsOfPlain = false;
        expectWorldSizeDoesNotMatter(way);
    }

    @Test
    void oneCopyAHostGivesTheBitsOfACopyARank() throws Exception {
        final Way way = new Way(smallBuckets().shareParams(true));
        way.inBackward = true;
        way.bitsOfPlain = true;
        expectWorldSizeDoesNotMatter(way);
    }
}
