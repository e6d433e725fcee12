package dev.tessera;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertFalse;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import java.nio.file.Path;
import java.util.Collections;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.function.Executable;
import org.junit.jupiter.api.io.TempDir;

class LrScheduleTest {
    @TempDir
    Path root;

    private static Optimizer sgd(double lr, double momentum) {
        return Optimizer.sgd(Params.of("w", Tensor.copyOf(new float[] {1f, 1f})), List.of(Tensor.copyOf(new float[] {1f, 1f})))
                .lr(lr).momentum(momentum).build();
    }

    private static void rate(double expected, long step, LrSchedule schedule) {
        try (schedule) {
            assertEquals(expected, schedule.lrAt(step, 1), 1e-12);
        }
    }

    @Test
    void everyKindHasItsValues() {
        rate(0.5, 3, LrSchedule.constant(0.5, 4));
        rate(0.25, 1, LrSchedule.linear(0, 1, 4));
        rate(0.25, 5, LrSchedule.stepDecay(2, 0.5));
        rate(0.25, 4, LrSchedule.multiStepDecay(0.5, 2, 4));
        rate(0.125, 3, LrSchedule.exponential(0.5));
        rate(0.25, 2, LrSchedule.polynomial(4, 2));
        rate(0.75, 2, LrSchedule.cosine(4, 0.5));
        rate(0.75, 4, LrSchedule.cosineRestarts(2, 2, 0.5));
        rate(0.5, 15, LrSchedule.inverseSqrt(4));
        rate(0.75, 6, LrSchedule.wsd(2, 2, 4, LrSchedule.Decay.LINEAR, 0.5));
        rate(0.75, 6, LrSchedule.wsd(2, 2, 4, LrSchedule.Decay.COSINE, 0.5));
        rate(0.75, 5, LrSchedule.wsd(2, 2, 4, LrSchedule.Decay.SQRT, 0.5));
        rate(0.25, 2, LrSchedule.warmup().warmupType(LrSchedule.WarmupType.LINEAR).warmupNumSteps(4).build());
        rate(0.25, 5, LrSchedule.warmup().warmupNumSteps(3).warmupMaxLr(0.5).totalNumSteps(5).build());
        rate(0.75, 6, LrSchedule.warmupCosine().totalNumSteps(8).warmupNumSteps(4).cosMinRatio(0.5).build());
        rate(0.5, 1, LrSchedule.oneCycle().cycleMinLr(0.25).cycleMaxLr(0.75).cycleFirstStepSize(2).build());
        rate(1.5, 7, LrSchedule.rangeTest(0.5, 4, 2, true));
        rate(0.125, 2, LrSchedule.chained(List.of(LrSchedule.constant(0.5, 9), LrSchedule.exponential(0.5))));
    }

    @Test
    void partsOfASequenceMayBeClosed() {
        final LrSchedule warmup = LrSchedule.linear(0, 1, 4);
        try (LrSchedule schedule = LrSchedule.sequential(List.of(warmup, LrSchedule.exponential(0.5)), 4)) {
            warmup.close();
            assertEquals(0.5, schedule.lrAt(2, 1));
            assertEquals(0.25, schedule.lrAt(6, 1));
            assertThrows(IllegalStateException.class, () -> LrSchedule.chained(List.of(schedule, warmup)));
            schedule.step();
        }
    }

    @Test
    void anOptimizerIsSet() {
        try (LrSchedule schedule = LrSchedule.exponential(0.5)) {
            try (Optimizer optimizer = sgd(0.5, 0)) {
                schedule.attach(optimizer);
                assertEquals(0.5, optimizer.lr());
                schedule.step();
                assertEquals(0.25, optimizer.lr());
                schedule.setSteps(3);
                assertEquals(0.0625, optimizer.lr());
                assertThrows(TesseraInvalidStateException.class, () -> schedule.attach(optimizer));
            }
            schedule.step();
            assertEquals(4, schedule.steps());
        }
    }

    @Test
    void momentumIsSetWhereThereIsOne() {
        try (LrSchedule cycle = LrSchedule.oneCycle().cycleMinLr(0.1).cycleMaxLr(0.5).cycleFirstStepSize(4).build();
                LrSchedule plain = LrSchedule.exponential(0.5);
                Optimizer with = sgd(0.5, 0.9);
                Optimizer without = sgd(0.5, 0)) {
            assertEquals(0.8, cycle.momentumAt(4).getAsDouble(), 1e-12);
            assertFalse(plain.momentumAt(4).isPresent());
            cycle.attach(with);
            final String message =
                    assertThrows(TesseraInvalidArgumentException.class, () -> cycle.attach(without)).getMessage();
            assertTrue(message.contains("has no momentum"), message);
        }
    }

    @Test
    void isSavedAndLoadedWithAState() throws Exception {
        Ranks.run(1, comm -> {
            try (Saver saver = Saver.at(comm, root).open();
                    Optimizer optimizer = sgd(0.4, 0);
                    Optimizer resumed = sgd(0.1, 0);
                    LrSchedule schedule = LrSchedule.cosine(20, 0.01);
                    LrSchedule other = LrSchedule.cosine(20, 0.01);
                    LrSchedule longer = LrSchedule.cosine(21, 0.01);
                    State state = new State().with("optim", optimizer).with("schedule", schedule);
                    State into = new State().with("optim", resumed).with("schedule", other);
                    State refused = new State().with("optim", resumed).with("schedule", longer)) {
                schedule.attach(optimizer);
                schedule.setSteps(3);
                saver.save(3, state);
                final String early =
                        assertThrows(TesseraMismatchException.class, () -> saver.resume(into)).getMessage();
                assertTrue(early.contains("attach the same optimizers before the load"), early);
                other.attach(resumed);
                assertEquals(3, saver.resume(into));
                for (int i = 0; i < 20; ++i) {
                    assertEquals(optimizer.lr(), resumed.lr(), "the same bits");
                    schedule.step();
                    other.step();
                }
                assertEquals(23, other.steps());
                final String message =
                        assertThrows(TesseraMismatchException.class, () -> saver.resume(refused)).getMessage();
                assertTrue(message.contains("schedule cosine(total_steps=20, min_lr=0.01), but this one is"), message);
                assertEquals(0, longer.steps());
            }
        });
    }

    @Test
    void badArgumentsAreRefused() {
        final LrSchedule growing = LrSchedule.exponential(10);
        final Map<String, Executable> bad = new LinkedHashMap<>();
        bad.put("factor is -1", () -> LrSchedule.constant(-1, 1));
        bad.put("end_factor is nan", () -> LrSchedule.linear(0, Double.NaN, 1));
        bad.put("total_steps is 0", () -> LrSchedule.cosine(0, 0));
        bad.put("milestone 1 is 2", () -> LrSchedule.multiStepDecay(0.5, 3, 2));
        bad.put("the number of milestones is 0", () -> LrSchedule.multiStepDecay(0.5));
        bad.put("have no sum", () -> LrSchedule.wsd(Long.MAX_VALUE, 1, 1, LrSchedule.Decay.LINEAR, 0));
        bad.put("warmup_num_steps is -1", () -> LrSchedule.warmup().warmupNumSteps(-1).build());
        bad.put("total_num_steps is not given", () -> LrSchedule.warmupCosine().build());
        bad.put("cycle_max_lr is not given", () -> LrSchedule.oneCycle().build());
        bad.put("step_size is 0", () -> LrSchedule.rangeTest(1, 0, 1, false));
        bad.put("the number of schedules is 0", () -> LrSchedule.chained(List.of()));
        bad.put("do not separate", () -> LrSchedule.sequential(List.of(growing), 5));
        bad.put("more than 1000", () -> LrSchedule.chained(
                List.of(LrSchedule.chained(Collections.nCopies(1000, growing)))));
        bad.put("at most 1000", () -> LrSchedule.chained(Collections.nCopies(1001, growing)));
        bad.put("the step is -1", () -> growing.lrAt(-1, 1));
        bad.put("base_lr is nan", () -> growing.lrAt(1, Double.NaN));
        bad.put("would be inf", () -> growing.lrAt(400, 1));
        bad.put("the step is -2", () -> growing.setSteps(-2));
        bad.put("the step is -3", () -> growing.momentumAt(-3));
        bad.forEach((said, call) -> {
            final String message = assertThrows(TesseraInvalidArgumentException.class, call, said).getMessage();
            assertTrue(message.contains(said), message);
        });
        final Map<String, Executable> missing = new LinkedHashMap<>();
        missing.put("schedule 0", () -> LrSchedule.chained(Collections.singletonList(null)));
        missing.put("schedules", () -> LrSchedule.sequential(null));
        missing.put("optimizer", () -> growing.attach(null));
        missing.put("decay", () -> LrSchedule.wsd(1, 1, 1, null, 0));
        missing.forEach((what, call) -> assertEquals(what, assertThrows(NullPointerException.class, call).getMessage()));
        assertEquals("LrSchedule(steps 0)", growing.toString());
        growing.close();
        assertEquals("LrSchedule(closed)", growing.toString());
        assertThrows(IllegalStateException.class, growing::step);
    }
}
