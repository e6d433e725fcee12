package dev.tessera;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import java.nio.file.Path;
import java.util.HashMap;
import java.util.LinkedHashMap;
import java.util.Map;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.io.TempDir;

class LossScaleTest {
    @TempDir
    Path root;

    private static LossScale.Builder small() {
        return LossScale.builder().initial(16).window(2).hysteresis(2).minimum(4);
    }

    @Test
    void itHalvesAndDoubles() {
        try (LossScale scale = small().build()) {
            assertEquals(16, scale.value());
            assertEquals(16, scale.update(true), "the first of two");
            assertEquals(8, scale.update(true));
            assertEquals(4, scale.update(true));
            final String message =
                    assertThrows(TesseraInvalidStateException.class, () -> scale.update(true)).getMessage();
            assertTrue(message.contains("at its minimum 4"), message);
            double last = 4;
            for (int i = 0; i < 3; ++i) {
                last = scale.update(false);
            }
            assertEquals(8, last, "two steps after the overflow");
            assertEquals(8, scale.value());
        }
        try (LossScale restores = small().restoresEveryStep(true).build()) {
            restores.update(true);
            restores.update(false);
            assertEquals(16, restores.update(true));
        }
        try (LossScale fixed = LossScale.builder().fixed(3).build()) {
            assertEquals(3, fixed.update(true));
        }
        try (LossScale plain = LossScale.builder().build()) {
            assertEquals(65536, plain.value());
        }
    }

    @Test
    void isSavedAndLoadedWithAState() throws Exception {
        Ranks.run(1, comm -> {
            try (Saver saver = Saver.at(comm, root).open();
                    LossScale scale = small().build();
                    LossScale other = small().build();
                    State state = new State().with("scale", scale);
                    State into = new State().with("scale", other)) {
                scale.update(true);
                scale.update(true);
                scale.update(false);
                saver.save(1, state);
                assertEquals(1, saver.resume(into));
                assertEquals(Map.of("scale", 8.0, "iteration", 3L, "last_overflow", 1L, "hysteresis", 1L),
                        other.stateDict());
                for (int i = 0; i < 4; ++i) {
                    assertEquals(scale.update(i == 2), other.update(i == 2));
                }
            }
        });
    }

    @Test
    void badStatesAreRefusedAndChangeNothing() {
        try (LossScale scale = small().build()) {
            final Map<String, Object> good = scale.stateDict();
            final Map<String, Object> bad = new LinkedHashMap<>();
            bad.put("scale", 0.0);
            bad.put("iteration", -1L);
            bad.put("last_overflow", 7L);
            bad.put("hysteresis", 0L);
            bad.forEach((name, value) -> {
                final Map<String, Object> values = new HashMap<>(good);
                values.put(name, value);
                assertThrows(TesseraInvalidArgumentException.class, () -> scale.loadStateDict(values), name);
                assertThrows(TesseraInvalidArgumentException.class, () -> scale.checkStateDict(values), name);
                values.put(name, "text");
                final String said =
                        assertThrows(IllegalArgumentException.class, () -> scale.loadStateDict(values)).getMessage();
                assertEquals("the saved '" + name + "' is text, not a number", said);
                values.remove(name);
                assertThrows(IllegalArgumentException.class, () -> scale.checkStateDict(values));
            });
            final Map<String, Object> half = new HashMap<>(good);
            half.put("iteration", 0.5);
            assertThrows(IllegalArgumentException.class, () -> scale.loadStateDict(half));
            assertEquals(good, scale.stateDict());
            scale.checkStateDict(good);
        }
    }

    @Test
    void badSettingsAreRefused() {
        final Map<LossScale.Builder, String> bad = new LinkedHashMap<>();
        bad.put(LossScale.builder().fixed(-1), "loss_scale is -1");
        bad.put(LossScale.builder().initial(0), "the initial scale is 0");
        bad.put(LossScale.builder().window(0), "loss_scale_window is 0");
        bad.put(LossScale.builder().hysteresis(0), "hysteresis is 0");
        bad.put(LossScale.builder().minimum(Double.NaN), "min_loss_scale is nan");
        bad.forEach((builder, said) -> {
            final String message = assertThrows(TesseraInvalidArgumentException.class, builder::build).getMessage();
            assertTrue(message.contains(said), message);
        });
        final LossScale closed = LossScale.builder().build();
        closed.close();
        assertThrows(IllegalStateException.class, closed::value);
    }
}
