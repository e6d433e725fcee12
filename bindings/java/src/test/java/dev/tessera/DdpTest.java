package dev.tessera;

import static org.junit.jupiter.api.Assertions.assertArrayEquals;
import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertFalse;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import java.nio.file.Path;
import java.util.List;
import java.util.Map;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.TimeUnit;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.io.TempDir;

class DdpTest {
    @TempDir
    Path root;

    private static Params params(float first) {
        return Params.of("fc.weight", Tensor.copyOf(new float[] {first, 2, 3, 4, 5, 6}, 2, 3))
                .and("fc.bias", Tensor.copyOf(new float[] {7, 8}));
    }

    @Test
    void optionsBeginWithTheDefaultsOfTheLibrary() {
        assertFalse(new DdpOptions().isFindUnused());
        assertTrue(new DdpOptions().findUnused(true).isFindUnused());
        assertTrue(new FsdpOptions().isSyncValues());
        assertTrue(new LoadOptions().isVerify());
        final DdpOptions negative = new DdpOptions();
        final var refused = assertThrows(IllegalArgumentException.class, () -> negative.firstBucketBytes(-1));
        assertEquals("firstBucketBytes is -1; it must not be negative", refused.getMessage());
    }

    @Test
    void everyRankTrainsTheSameModel() throws Exception {
        Ranks.run(3, comm -> {
            final Params params = params(comm.rank() + 1);
            try (Ddp ddp = Ddp.create(comm, params, new DdpOptions().bucketBytes(16).firstBucketBytes(8));
                    Optimizer sgd = Optimizer.sgd(ddp).lr(0.5).build()) {
                assertEquals(1f, params.tensors().get(0).floats().get(0), "rank 0's value");
                assertEquals(2, ddp.size());
                assertEquals("fc.bias", ddp.name(1));
                assertEquals(8f, ddp.param(1).get(1));
                assertArrayEquals(new long[] {2, 3}, ddp.paramTensor(0).shape());
                assertThrows(IndexOutOfBoundsException.class, () -> ddp.param(2));
                assertArrayEquals(new long[] {2, 3}, ddp.gradTensor(0).shape());
                for (int step = 0; step < 3; ++step) {
                    for (int i = 0; i < 6; ++i) {
                        ddp.grad(0).put(i, comm.rank());
                    }
                    ddp.grad(1).put(0, 3 * comm.rank()).put(1, -1);
                    ddp.ready(1);
                    ddp.ready(0);
                    ddp.await();
                    assertEquals(1f, ddp.grad(0).get(5));
                    assertEquals(3f, ddp.grad(1).get(0));
                    sgd.step();
                    ddp.zeroGrad();
                    assertEquals(0f, ddp.grad(1).get(0));
                }
                assertEquals(1f - 3 * 0.5f, ddp.param(0).get(0), 1e-6);
                assertEquals(1f - 3 * 0.5f, params.tensors().get(0).floats().get(0), 1e-6);
                assertEquals(8f + 3 * 0.5f, params.tensors().get(1).floats().get(1), 1e-6);
                assertEquals(3, sgd.steps());
            }
        });
    }

    @Test
    void theOtherOptimizersAndTheSum() throws Exception {
        Ranks.run(2, comm -> {
            final Params params = params(1);
            try (Ddp ddp = Ddp.create(comm, params, new DdpOptions().op(ReduceOp.SUM));
                    Optimizer adam = Optimizer.adam(ddp).lr(0.25).build();
                    Optimizer adagrad = Optimizer.adagrad(ddp).lr(0.25).build();
                    Optimizer lion = Optimizer.lion(ddp).lr(0.25).build();
                    Optimizer lamb = Optimizer.lamb(ddp).lr(0.25).maxCoeff(1).minCoeff(1).build();
                    Optimizer adamW = Optimizer.adamW(ddp).lr(0.25).weightDecay(0).build()) {
                ddp.grad(0).put(0, 2);
                ddp.readyAll();
                ddp.await();
                assertEquals(4f, ddp.grad(0).get(0));
                adam.step();
                assertEquals(0.75f, params.tensors().get(0).floats().get(0), 1e-5);
                adamW.step();
                assertEquals(0.5f, params.tensors().get(0).floats().get(0), 1e-5);
                adagrad.step();
                assertEquals(0.25f, params.tensors().get(0).floats().get(0), 1e-5);
                lion.step();
                assertEquals(0f, params.tensors().get(0).floats().get(0), 1e-5);
                lamb.step();
                assertEquals(-0.25f, params.tensors().get(0).floats().get(0), 1e-5);
                adam.zeroGrad();
                assertEquals(0f, ddp.grad(0).get(0));
            }
        });
    }

    @Test
    void aGradientIsWrittenFromItsBeginningAtEachStep() throws Exception {
        Ranks.run(1, comm -> {
            try (Ddp ddp = Ddp.create(comm, params(0));
                    Optimizer sgd = Optimizer.sgd(ddp).lr(1).build()) {
                for (int step = 1; step <= 3; step++) {
                    for (int i = 0; i < ddp.size(); i++) {
                        for (final var grad = ddp.grad(i); grad.hasRemaining();) {
                            grad.put(step);
                        }
                    }
                    ddp.readyAll();
                    assertThrows(TesseraInvalidStateException.class, ddp::readyAll, "twice");
                    ddp.await();
                    sgd.step();
                    final String again = assertThrows(TesseraInvalidStateException.class, sgd::step).getMessage();
                    assertTrue(again.contains("no gradients were reduced"), again);
                }
                assertEquals(-6f, ddp.param(0).get(0));
                assertEquals(2f, ddp.param(1).get(1));
            }
        });
    }

    @Test
    void doublesAndPrefixes() throws Exception {
        Ranks.run(1, comm -> {
            final Tensor weight = Tensor.zeros(DType.F64, 2);
            try (Ddp ddp = Ddp.create(comm, Params.of(Map.of("module.w", weight)))) {
                assertEquals("w", ddp.name(0));
                ddp.gradTensor(0).doubles().put(0, 1.5);
                assertThrows(IllegalArgumentException.class, () -> ddp.grad(0));
                assertEquals(List.of("module.w"), ddp.params().names());
            }
        });
    }

    @Test
    void forgottenAndDoubledGradientsAreNamed() throws Exception {
        Ranks.run(1, comm -> {
            try (Ddp ddp = Ddp.create(comm, params(1))) {
                ddp.ready(0);
                final TesseraInvalidStateException twice =
                        assertThrows(TesseraInvalidStateException.class, () -> ddp.ready(0));
                assertTrue(twice.getMessage().contains("fc.weight"), twice.getMessage());
                final TesseraInvalidStateException missing =
                        assertThrows(TesseraInvalidStateException.class, ddp::await);
                assertTrue(missing.getMessage().contains("fc.bias"), missing.getMessage());
                ddp.ready(1); // the step may be completed
                ddp.await();
                assertThrows(IndexOutOfBoundsException.class, () -> ddp.ready(2));
                assertThrows(IndexOutOfBoundsException.class, () -> ddp.grad(-1));
            }
        });
    }

    @Test
    void modelsThatDifferAreRefusedByName() throws Exception {
        Ranks.runStores(2, (store, rank) -> {
            try (Comm comm = Comm.create(store, rank, 2, Ranks.options())) {
                final Params params = Params.of("same", Tensor.zeros(DType.F32, 2))
                        .and("odd", Tensor.zeros(DType.F32, 2 + rank));
                final TesseraMismatchException error =
                        assertThrows(TesseraMismatchException.class, () -> Ddp.create(comm, params));
                assertTrue(error.getMessage().contains("odd"), error.getMessage());
                store.set("failed on " + rank, new byte[0]);
                store.await("failed on " + (1 - rank));
            }
        });
    }

    @Test
    void integersHaveNoGradients() throws Exception {
        Ranks.run(1, comm -> {
            assertThrows(TesseraInvalidArgumentException.class,
                    () -> Ddp.create(comm, Params.of("i", Tensor.zeros(DType.I32, 2))));
            assertThrows(TesseraInvalidArgumentException.class, () -> Ddp.create(comm, Params.of(Map.of())));
            assertThrows(NullPointerException.class, () -> Ddp.create(comm, null));
            assertThrows(NullPointerException.class, () -> Params.of("w", (Tensor) null));
            assertThrows(IllegalArgumentException.class, () -> new DdpOptions().bucketBytes(-1));
        });
    }

    private static void fill(Ddp ddp, int index, float value) {
        for (int i = 0; i < ddp.grad(index).capacity(); ++i) {
            ddp.grad(index).put(i, value);
        }
    }

    @Test
    void stepsWithoutSynchronisationAddUp() throws Exception {
        Ranks.run(2, comm -> {
            try (Ddp ddp = Ddp.create(comm, params(1))) {
                ddp.setSync(false);
                for (int micro = 1; micro <= 3; ++micro) {
                    fill(ddp, 0, micro * comm.rank());
                    ddp.ready(0);
                    ddp.await();
                }
                assertEquals(3f * comm.rank(), ddp.grad(0).get(0));
                ddp.setSync(true);
                ddp.readyAll();
                assertThrows(TesseraInvalidStateException.class, () -> ddp.setSync(false));
                ddp.await();
                assertEquals(1.5f, ddp.grad(0).get(0));
            }
        });
    }

    @Test
    void theCpuHasNoStreams() throws Exception {
        Ranks.run(1, comm -> {
            try (Ddp ddp = Ddp.create(comm, params(1))) {
                ddp.setStream(0);
                assertThrows(TesseraInvalidArgumentException.class, () -> ddp.setStream(1));
            }
        });
    }

    @Test
    void unusedParametersAreFoundAndStaticGraphsKept() throws Exception {
        Ranks.run(2, comm -> {
            try (Ddp ddp = Ddp.create(comm, params(1), new DdpOptions().findUnused(true))) {
                fill(ddp, 1, 7);
                if (comm.rank() == 0) {
                    fill(ddp, 0, 2);
                    ddp.ready(0);
                }
                ddp.await();
                assertTrue(ddp.used(0));
                assertFalse(ddp.used(1));
                assertEquals(1f, ddp.grad(0).get(0));
                assertEquals(7f, ddp.grad(1).get(0));
                assertThrows(IndexOutOfBoundsException.class, () -> ddp.used(2));
            }
            try (Ddp ddp = Ddp.create(comm, params(1), new DdpOptions().staticGraph(true))) {
                ddp.ready(0);
                ddp.await();
                assertTrue(assertThrows(TesseraInvalidStateException.class, () -> ddp.ready(1)).getMessage()
                        .contains("fc.bias"));
            }
        });
    }

    @Test
    void whatIsSentAndInWhichBucketsIsAnOption() throws Exception {
        Ranks.run(2, comm -> {
            final DdpOptions options = new DdpOptions().bucketBytes(1).firstBucketBytes(1).reduceDtype(DType.BF16)
                    .preDivide(2).rebuildBuckets(true);
            try (Ddp ddp = Ddp.create(comm, params(1), options)) {
                for (int step = 0; step < 2; ++step) {
                    fill(ddp, 0, comm.rank());
                    ddp.ready(0);
                    ddp.ready(1);
                    ddp.await();
                    assertEquals(0.5f, ddp.grad(0).get(0));
                }
                final List<Ddp.BucketStats> stats = ddp.stats();
                assertEquals(2, stats.size());
                assertEquals(1, stats.get(0).params());
                assertEquals(64, stats.get(0).sizeBytes());
                assertTrue(stats.get(0).readyNanos() <= stats.get(0).startNanos());
                assertTrue(stats.get(0).startNanos() <= stats.get(0).endNanos());
                assertTrue(stats.get(0).exposedNanos() <= stats.get(0).endNanos());
            }
            try (Ddp ddp = Ddp.create(comm, params(1), new DdpOptions().hook(DdpOptions.Hook.NOOP))) {
                fill(ddp, 0, comm.rank());
                ddp.readyAll();
                ddp.await();
                assertEquals((float) comm.rank(), ddp.grad(0).get(0));
            }
            final DdpOptions low = new DdpOptions().hook(DdpOptions.Hook.POWER_SGD).powersgdRank(1).powersgdStartStep(0);
            try (Ddp ddp = Ddp.create(comm, Params.of("m", Tensor.zeros(DType.F32, 20, 30)), low)) {
                fill(ddp, 0, comm.rank());
                ddp.readyAll();
                ddp.await();
                assertEquals(0.5f, ddp.grad(0).get(599), 1e-5);
            }
        });
    }

    /** Two models in one step, the gradients of one between those of the other, both in flight at once. */
    private static void trainTwo(Comm first, Comm second, boolean secondFirst) {
        final DdpOptions options = new DdpOptions().bucketBytes(1).firstBucketBytes(1);
        final Params[] params = {params(10), params(20)};
        try (Ddp one = Ddp.create(first, params[0], options);
                Ddp two = Ddp.create(second, params[1], options);
                Optimizer sgdOne = Optimizer.sgd(one).lr(0.5).build();
                Optimizer sgdTwo = Optimizer.sgd(two).lr(0.5).build()) {
            final Ddp[] models = {one, two};
            final Optimizer[] optimizers = {sgdOne, sgdTwo};
            for (int step = 1; step <= 3; ++step) {
                for (int[] next : new int[][] {{0, 0}, {1, 1}, {0, 1}, {1, 0}}) {
                    final Ddp model = models[next[0]];
                    fill(model, next[1], 100 * next[0] + 10 * step + next[1] + first.rank());
                    model.ready(next[1]);
                }
                for (int k = 0; k < 2; ++k) {
                    final int m = secondFirst ? 1 - k : k;
                    models[m].await();
                    optimizers[m].step();
                }
                for (int m = 0; m < 2; ++m) {
                    for (int i = 0; i < 2; ++i) { // the average of three ranks
                        assertEquals(100f * m + 10 * step + i + 1, models[m].grad(i).get(0));
                        assertEquals(100f * m + 10 * step + i + 1, models[m].grad(i).get(1));
                    }
                }
            }
            assertEquals(10 - 0.5f * 63, params[0].tensors().get(0).floats().get(0));
            assertEquals(20 - 0.5f * 363, params[1].tensors().get(0).floats().get(0));
            assertEquals(7 - 0.5f * 66, params[0].tensors().get(1).floats().get(0));
            assertEquals(7 - 0.5f * 366, params[1].tensors().get(1).floats().get(0));
        }
    }

    @Test
    void twoModelsTrainInOneProcess() throws Exception {
        Ranks.run(3, comm -> {
            trainTwo(comm, comm, false);
            try (Comm first = comm.split(0, comm.rank()); Comm second = comm.split(0, comm.rank())) {
                trainTwo(first, second, comm.rank() == 1); // who is waited for first is each rank's own
            }
        });
    }

    @Test
    void badOptionsAreRefused() throws Exception {
        Ranks.run(1, comm -> {
            for (DdpOptions options : List.of(new DdpOptions().preDivide(0), new DdpOptions().reduceDtype(DType.I32),
                    new DdpOptions().powersgdRank(0), new DdpOptions().powersgdStartStep(-1))) {
                assertThrows(TesseraInvalidArgumentException.class, () -> Ddp.create(comm, params(1), options));
            }
        });
    }

    @Test
    void aHookReducesWithTheCommunicatorItIsLent() throws Exception {
        Ranks.run(2, comm -> {
            try (Ddp ddp = Ddp.create(comm, params(1))) {
                final List<Comm> lent = new java.util.concurrent.CopyOnWriteArrayList<>();
                ddp.setHook(bucket -> {
                    assertEquals(0, bucket.index());
                    assertArrayEquals(new int[] {1, 0}, bucket.params());
                    for (Tensor grad : bucket.grads()) {
                        bucket.comm().allReduce(grad, ReduceOp.MAX);
                    }
                    assertThrows(TesseraInvalidStateException.class, () -> bucket.comm().barrierAsync());
                    lent.add(bucket.comm());
                });
                fill(ddp, 0, comm.rank());
                ddp.readyAll();
                ddp.await();
                assertEquals(1f, ddp.grad(0).get(0));
                assertEquals(1, lent.size());
                assertThrows(IllegalStateException.class, () -> lent.get(0).barrier());
                ddp.setHook(null);
                fill(ddp, 0, comm.rank());
                ddp.readyAll();
                ddp.await();
                assertEquals(0.5f, ddp.grad(0).get(0));
                assertEquals(1, lent.size());
            }
        });
    }

    @Test
    void whatAHookThrowsFailsTheStepOnEveryRank() throws Exception {
        Ranks.run(2, comm -> {
            try (Ddp ddp = Ddp.create(comm, params(1))) {
                ddp.setHook(bucket -> {
                    if (comm.rank() == 1) {
                        throw new java.io.IOException("lost");
                    }
                    bucket.comm().barrier();
                });
                final TesseraException error = assertThrows(TesseraException.class, () -> {
                    ddp.readyAll();
                    ddp.await();
                });
                if (comm.rank() == 1) {
                    assertEquals(ErrorCode.USER, error.code(), error.getMessage());
                    assertEquals("lost", error.getSuppressed()[0].getMessage());
                } else {
                    assertEquals(ErrorCode.ABORTED, error.code(), error.getMessage());
                }
                assertTrue(error.getMessage().contains("rank 1: the hook for bucket 0 returned 1"), error.getMessage());
            }
        });
    }

    @Test
    void anOptimizerStepsInBackward() throws Exception {
        Ranks.run(2, comm -> {
            try (Ddp ddp = Ddp.create(comm, params(1));
                    Ddp other = Ddp.create(comm, params(1));
                    Optimizer sgd = Optimizer.sgd(ddp).lr(0.5).build()) {
                assertThrows(TesseraInvalidArgumentException.class, () -> other.stepInBackward(sgd));
                ddp.stepInBackward(sgd);
                fill(ddp, 0, comm.rank());
                ddp.readyAll();
                ddp.await();
                assertEquals(0.75f, ddp.param(0).get(0));
                assertEquals(1, sgd.steps());
                assertThrows(TesseraInvalidStateException.class, sgd::step);
            }
        });
    }

    @Test
    void theRanksOfAHostShareTheParameters() throws Exception {
        Ranks.run(2, comm -> {
            try (Ddp ddp = Ddp.create(comm, params(comm.rank()), new DdpOptions().shareParams(true));
                    Ddp plain = Ddp.create(comm, params(1))) {
                assertThrows(TesseraInvalidStateException.class, plain::sharedStep);
                assertThrows(TesseraInvalidStateException.class, ddp::readyAll);
                try (Optimizer sgd = Optimizer.sgd(ddp).lr(0.5).build()) {
                    for (int i = 0; i < ddp.size(); ++i) {
                        fill(ddp, i, comm.rank());
                    }
                    ddp.readyAll();
                    ddp.await();
                    assertEquals(-0.25f, ddp.param(0).get(0), "from rank 0's zeros");
                    assertEquals(-0.25f, ddp.params().tensors().get(0).floats().get(0));
                    assertEquals(1, ddp.sharedStep());
                    assertEquals(1, sgd.steps());
                    final State state = State.of("model", ddp).with("optim", sgd);
                    try (Saver saver = Saver.at(comm, root).open()) {
                        saver.save(1, state);
                        for (int i = 0; i < ddp.size(); ++i) {
                            fill(ddp, i, 2);
                        }
                        ddp.readyAll();
                        ddp.await();
                        assertEquals(-1.25f, ddp.param(0).get(0));
                        assertEquals(1, saver.resume(state));
                    }
                    assertEquals(-0.25f, ddp.param(0).get(0), "as saved");
                    assertEquals(1, sgd.steps());
                    assertEquals(2, ddp.sharedStep());
                    comm.barrier();
                }
            }
        });
    }

    @Test
    void aStepThatFailsBetweenBucketsLeavesATornCopy() throws Exception {
        final CountDownLatch failed = new CountDownLatch(2);
        Ranks.run(2, comm -> {
            final DdpOptions options = new DdpOptions().shareParams(true).bucketBytes(8).firstBucketBytes(8);
            try (Ddp ddp = Ddp.create(comm, params(1), options);
                    Optimizer sgd = Optimizer.sgd(ddp).lr(0.5).build()) {
                ddp.setHook(bucket -> {
                    if (comm.rank() == 1 && bucket.index() == 1) {
                        throw new java.io.IOException("lost");
                    }
                    bucket.comm().barrier();
                });
                assertThrows(TesseraException.class, () -> {
                    ddp.readyAll();
                    ddp.await();
                });
                failed.countDown();
                assertTrue(failed.await(Patience.seconds(20), TimeUnit.SECONDS));
                final TesseraException torn = assertThrows(TesseraCorruptException.class, ddp::sharedStep);
                assertTrue(
                        torn.getMessage().contains("the slice of local rank 0 is between step 0 and step 1"),
                        torn.getMessage());
                assertEquals(0, sgd.steps());
            }
        });
    }

    @Test
    void buffersComeFromRank0AndRanksJoin() throws Exception {
        Ranks.run(2, comm -> {
            final DdpOptions options = new DdpOptions().join(DdpOptions.Join.DIVIDE_BY_ACTIVE);
            try (Ddp ddp = Ddp.create(comm, params(1), options);
                    Ddp plain = Ddp.create(comm, params(1))) {
                assertThrows(TesseraInvalidStateException.class, ddp::broadcastBuffers);
                assertThrows(TesseraInvalidStateException.class, () -> plain.join(true));
                final Tensor mean = Tensor.copyOf(new float[] {comm.rank() + 5});
                ddp.registerBuffers(Params.of("mean", mean));
                assertEquals(5f, mean.floats().get(0));
                for (int step = 0; step < 1 + 2 * comm.rank(); ++step) {
                    mean.floats().put(0, 10 * step + comm.rank());
                    ddp.broadcastBuffers();
                    fill(ddp, 0, comm.rank() + 1);
                    ddp.readyAll();
                    ddp.await();
                    assertEquals(step == 0 ? 1.5f : 2f, ddp.grad(0).get(0));
                }
                ddp.join(true);
                assertEquals(21f, mean.floats().get(0), "of rank 1, which made most steps");
            }
        });
    }

    @Test
    void ranksThatJoinedCountAsZerosWhereSumsAreDividedByTheWorld() throws Exception {
        Ranks.run(3, comm -> {
            final DdpOptions options = new DdpOptions().join(DdpOptions.Join.DIVIDE_BY_WORLD);
            try (Ddp ddp = Ddp.create(comm, params(1), options)) {
                final float[] means = {6, 5, 3}; // of 3, 6 and 9; without 3; without 6
                for (int step = 0; step <= comm.rank(); ++step) {
                    fill(ddp, 0, 3 * (comm.rank() + 1));
                    ddp.readyAll();
                    ddp.await();
                    assertEquals(means[step], ddp.grad(0).get(0));
                }
                ddp.join(false);
            }
        });
    }
}
