package dev.tessera;

import static org.junit.jupiter.api.Assertions.assertArrayEquals;
import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import java.util.List;
import java.util.Map;
import org.junit.jupiter.api.Test;

class DdpTest {
    private static Params params(float first) {
        return Params.of("fc.weight", Tensor.copyOf(new float[] {first, 2, 3, 4, 5, 6}, 2, 3))
                .and("fc.bias", Tensor.copyOf(new float[] {7, 8}));
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
                    Optimizer adamW = Optimizer.adamW(ddp).lr(0.25).weightDecay(0).build()) {
                ddp.grad(0).put(0, 2);
                ddp.readyAll();
                ddp.await();
                assertEquals(4f, ddp.grad(0).get(0));
                adam.step();
                assertEquals(0.75f, params.tensors().get(0).floats().get(0), 1e-5);
                adamW.step();
                assertEquals(0.5f, params.tensors().get(0).floats().get(0), 1e-5);
                adam.zeroGrad();
                assertEquals(0f, ddp.grad(0).get(0));
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
}
