package dev.tessera;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertFalse;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import java.nio.file.Path;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.io.TempDir;

class GradScalerTest {
    @TempDir
    Path root;

    private final Tensor weight = Tensor.copyOf(new float[] {1f, 1f});
    private final Tensor grad = Tensor.copyOf(new float[] {0f, 0f});

    private Optimizer sgd() {
        return Optimizer.sgd(Params.of("w", weight), List.of(grad)).lr(1).build();
    }

    @Test
    void stepsAreMadeOrLeftOutAndTheScaleFollows() {
        try (Optimizer optimizer = sgd();
                GradScaler scaler = GradScaler.builder().initScale(8).growthFactor(4).backoffFactor(0.25).growthInterval(2)
                        .build()) {
            final float[] grads = {0.25f, 0.25f, Float.POSITIVE_INFINITY, 0.25f, Float.NaN};
            final double[] scales = {8, 32, 8, 8, 2};
            float value = 1;
            for (int i = 0; i < grads.length; ++i) {
                grad.floats().put(0, grads[i] * (float) scaler.scale());
                final boolean finite = Float.isFinite(grads[i]);
                assertEquals(finite, scaler.step(optimizer), "step " + i);
                scaler.update();
                value -= finite ? grads[i] : 0;
                assertEquals(value, weight.floats().get(0));
                assertEquals(scales[i], scaler.scale());
            }
            assertEquals(3, optimizer.steps());
        }
    }

    @Test
    void gradientsMayBeBoundedBeforeTheStep() {
        try (Optimizer optimizer = sgd(); GradScaler scaler = GradScaler.builder().initScale(4).build()) {
            grad.floats().put(0, 12).put(1, 16);
            scaler.unscale(optimizer);
            assertEquals(5, optimizer.clipGradNorm(1));
            assertTrue(scaler.step(optimizer));
            assertEquals(0.4f, weight.floats().get(0), 1e-5);
        }
    }

    @Test
    void overAShardedModelAllRanksDecideAlike() throws Exception {
        Ranks.run(3, comm -> {
            try (Fsdp fsdp = Fsdp.create(comm, List.of(FsdpUnit.of("u").andDeferred("w", DType.F32, 6)));
                    Optimizer optimizer = Optimizer.adamW(fsdp).build();
                    GradScaler scaler = GradScaler.builder().initScale(4).growthInterval(1).build()) {
                for (float last : new float[] {Float.POSITIVE_INFINITY, 2f}) { // of the last row, which rank 2 has
                    try (Fsdp.Pass pass = fsdp.backward("u")) {
                        for (int i = 0; i < 6; ++i) {
                            pass.grad("w").put(i, i < 5 ? 4f : last);
                        }
                        pass.ready();
                    }
                    fsdp.await();
                    assertEquals(Float.isFinite(last), scaler.step(optimizer), "on rank " + comm.rank());
                    scaler.update();
                }
                assertEquals(4, scaler.scale());
                assertEquals(1, optimizer.steps());
                assertTrue(fsdp.shard(0).get(0) < 0);
            }
        });
    }

    @Test
    void isSavedAndLoadedWithAState() throws Exception {
        Ranks.run(1, comm -> {
            try (Saver saver = Saver.at(comm, root).open();
                    Optimizer optimizer = sgd();
                    GradScaler scaler = GradScaler.builder().initScale(32).growthInterval(2).build();
                    GradScaler other = GradScaler.builder().build();
                    State state = State.of("w", weight).with("scaler", scaler);
                    State into = State.of("w", weight).with("scaler", other)) {
                scaler.step(optimizer);
                scaler.update();
                saver.save(1, state);
                assertEquals(1, saver.resume(into));
                assertEquals(32, other.scale());
                other.step(optimizer);
                other.update();
                assertEquals(64, other.scale(), "the second step of two");
            }
        });
    }

    @Test
    void badSettingsAreRefused() {
        final Map<GradScaler.Builder, String> bad = new LinkedHashMap<>();
        bad.put(GradScaler.builder().initScale(0), "init_scale is 0");
        bad.put(GradScaler.builder().growthFactor(1), "growth_factor is 1");
        bad.put(GradScaler.builder().backoffFactor(Double.NaN), "backoff_factor is nan");
        bad.put(GradScaler.builder().growthInterval(0), "growth_interval is 0");
        bad.forEach((builder, said) -> {
            final String message = assertThrows(TesseraInvalidArgumentException.class, builder::build).getMessage();
            assertTrue(message.contains(said), message);
        });
    }

    @Test
    void whatComesInTheWrongOrderIsRefused() {
        final Optimizer optimizer = sgd();
        try (GradScaler scaler = GradScaler.builder().build()) {
            assertThrows(TesseraInvalidStateException.class, scaler::update);
            scaler.unscale(optimizer);
            final String twice =
                    assertThrows(TesseraInvalidStateException.class, () -> scaler.unscale(optimizer)).getMessage();
            assertTrue(twice.contains("already unscaled"), twice);
            assertTrue(scaler.step(optimizer));
            final String again = assertThrows(TesseraInvalidStateException.class, () -> scaler.step(optimizer)).getMessage();
            assertTrue(again.contains("call update() first"), again);
            scaler.update();
            assertFalse(scaler.isClosed());
        } finally {
            optimizer.close();
        }
        try (GradScaler scaler = GradScaler.builder().build()) {
            assertThrows(IllegalStateException.class, () -> scaler.step(optimizer));
        }
    }
}
