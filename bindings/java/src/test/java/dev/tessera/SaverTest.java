package dev.tessera;

import static org.junit.jupiter.api.Assertions.assertArrayEquals;
import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertFalse;
import static org.junit.jupiter.api.Assertions.assertInstanceOf;
import static org.junit.jupiter.api.Assertions.assertNotEquals;
import static org.junit.jupiter.api.Assertions.assertSame;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import java.io.IOException;
import java.io.UncheckedIOException;
import java.nio.file.Files;
import java.nio.file.Path;
import java.nio.file.StandardOpenOption;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.Collections;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.Set;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.CompletionException;
import java.util.concurrent.ConcurrentHashMap;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.ExecutionException;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.atomic.AtomicBoolean;
import java.util.stream.Collectors;
import java.util.stream.Stream;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.function.Executable;
import org.junit.jupiter.api.io.TempDir;

/** What a saver keeps, does while it is busy, tells of its progress, and when the ranks stop together. */
class SaverTest {
    private static final int FLOATS = 6 << 20;

    @TempDir
    Path root;

    private List<Long> steps() throws Exception {
        try (Stream<Path> saves = Files.list(root)) {
            return saves.filter(p -> Files.exists(p.resolve("manifest.json")))
                    .map(p -> Long.valueOf(p.getFileName().toString().split("-")[1]))
                    .sorted()
                    .collect(Collectors.toList());
        }
    }

    private static State state(double value) {
        final Tensor tensor = Tensor.zeros(DType.F32, 3);
        tensor.floats().put(0, (float) value);
        return State.of("w", tensor);
    }

    /** Holds the first save in the background until it is opened. */
    private static final class Gate implements Progress {
        final CountDownLatch reached = new CountDownLatch(1);
        final CountDownLatch opened = new CountDownLatch(1);

        @Override
        public void update(Phase phase, long done, long total) {
            if (phase == Phase.WRITE && reached.getCount() > 0) {
                reached.countDown();
                assertTrue(awaited(opened));
            }
        }

        static boolean awaited(CountDownLatch latch) {
            try {
                return latch.await(Patience.seconds(60), TimeUnit.SECONDS);
            } catch (InterruptedException interrupted) {
                return false;
            }
        }
    }

    @Test
    void whatStaysIsTheUnionOfTheNewestTheBestAndEveryNth() throws Exception {
        final double[] losses = {0.5, 0.1, 0.4, 0.9, 0.8, 0.7};
        try (Saver saver = Saver.at(null, root).keepLatest(1).keepBest(1).bestMetric("loss").keepEvery(4).open()) {
            for (int i = 0; i < losses.length; ++i) {
                saver.save(i + 1, state(i + 1).metric("loss", losses[i]));
            }
        }
        assertEquals(List.of(2L, 4L, 6L), steps());
        try (Checkpoint best = Checkpoint.open(root.resolve("best"))) {
            assertEquals(2, best.step());
        }
    }

    @Test
    void higherMayBeBetterAndWhatIsOpenStays() throws Exception {
        try (Saver saver = Saver.at(null, root).keepLatest(1).bestMetric("accuracy").bestIsHigher(true).open()) {
            saver.save(1, state(7).metric("accuracy", 0.3));
            try (Checkpoint first = Checkpoint.open(root)) {
                saver.save(2, state(0).metric("accuracy", 0.9));
                saver.save(3, state(0).metric("accuracy", 0.5));
                assertEquals(List.of(1L, 2L, 3L), steps());
                assertEquals(7f, first.read("w").floats().get(0));
            }
            try (Checkpoint best = Checkpoint.open(root.resolve("best"))) {
                assertEquals(2, best.step());
            }
            saver.save(4, state(0).metric("accuracy", 0.6));
        }
        assertEquals(List.of(2L, 4L), steps());
    }

    @Test
    void optionsThatCannotBeAreNamed() {
        final Map<String, Saver.Builder> bad = new LinkedHashMap<>();
        bad.put("best_metric", Saver.at(null, root).keepBest(2));
        bad.put("keep_latest", Saver.at(null, root).keepEvery(5));
        bad.put("staging_bytes is 1", Saver.at(null, root).stagingBytes(1));
        bad.put("write_bytes_per_s is -3", Saver.at(null, root).writeBytesPerSecond(-3));
        bad.forEach((word, builder) -> {
            final String message = assertThrows(TesseraInvalidArgumentException.class, builder::open).getMessage();
            assertTrue(message.contains(word), message);
        });
    }

    @Test
    void aBusySaverCanRefuse() throws Exception {
        final Gate gate = new Gate();
        try (Saver saver = Saver.at(null, root).whenBusy(Saver.WhenBusy.REFUSE).progress(gate).open()) {
            final CompletableFuture<Saver.Commit> first = saver.saveAsync(1, state(1));
            assertTrue(Gate.awaited(gate.reached));
            final TesseraException error = assertThrows(TesseraException.class, () -> saver.saveAsync(2, state(2)));
            assertEquals(ErrorCode.NOT_READY, error.code());
            gate.opened.countDown();
            assertEquals(1, first.get(Patience.seconds(60), TimeUnit.SECONDS).step());
            saver.await();
            saver.saveAsync(3, state(3)).get(Patience.seconds(60), TimeUnit.SECONDS);
        }
        assertEquals(List.of(1L, 3L), steps());
    }

    @Test
    void aNewerSaveCanReplaceTheOneThatWaits() throws Exception {
        final Gate gate = new Gate();
        try (Saver saver = Saver.at(null, root).whenBusy(Saver.WhenBusy.REPLACE).progress(gate).open()) {
            saver.saveAsync(1, state(1));
            assertTrue(Gate.awaited(gate.reached));
            final CompletableFuture<Saver.Commit> second = saver.saveAsync(2, state(2));
            final CompletableFuture<Saver.Commit> third = saver.saveAsync(3, state(3));
            final Throwable why = assertThrows(CompletionException.class, second::join).getCause();
            assertEquals(TesseraAbortedException.class, why.getClass());
            gate.opened.countDown();
            assertEquals(3, third.get(Patience.seconds(60), TimeUnit.SECONDS).step());
        }
        assertEquals(List.of(1L, 3L), steps());
    }

    @Test
    void aStateLargerThanTheStagingMemoryGoesThroughItAsARing() throws Exception {
        final Tensor weight = Tensor.zeros(DType.F32, FLOATS); // 24 MiB
        for (int i = 0; i < FLOATS; ++i) {
            weight.floats().put(i, i);
        }
        try (Saver saver = Saver.at(null, root).stagingBytes(8 << 20).writeBytesPerSecond(1L << 30).lowPriority(true)
                .open()) {
            final CompletableFuture<Saver.Commit> save = saver.saveAsync(1, State.of("w", weight));
            for (int i = 0; i < FLOATS; ++i) {
                weight.floats().put(i, -1); // the copy is made
            }
            save.get(Patience.seconds(60), TimeUnit.SECONDS);
            saver.trim();
            assertEquals(1, saver.resume(State.of("w", weight)));
        }
        for (int i = 0; i < FLOATS; ++i) {
            if (weight.floats().get(i) != i) {
                assertEquals(i, weight.floats().get(i), "element " + i);
            }
        }
    }

    /** The nice value of the calling thread: the 19th field of its state, the 17th behind its name. */
    private static int niceness() {
        try {
            final String stat = Files.readString(Path.of("/proc/thread-self/stat"));
            return Integer.parseInt(stat.substring(stat.lastIndexOf(')') + 2).split(" ")[16]);
        } catch (IOException e) {
            throw new UncheckedIOException(e);
        }
    }

    @Test
    void lowPriorityIsThatOfTheThreadsThatWrite() throws Exception {
        for (boolean low : new boolean[] {false, true}) {
            final Set<Integer> told = ConcurrentHashMap.newKeySet();
            try (Saver saver = Saver.at(null, root).lowPriority(low).progress((phase, done, total) -> {
                if (phase == Progress.Phase.WRITE) {
                    told.add(niceness());
                }
            }).open()) {
                saver.saveAsync(1, state(1)).get(Patience.seconds(60), TimeUnit.SECONDS);
            }
            assertEquals(Set.of(low ? Math.max(niceness(), 10) : niceness()), told);
        }
    }

    @Test
    void whatAnOptimizerOwnsIsCopiedBeforeItsNextStepChangesIt() throws Exception {
        final int n = 1 << 20;
        final Tensor weight = Tensor.zeros(DType.F32, n);
        final Tensor gradient = Tensor.zeros(DType.F32, n);
        for (int i = 0; i < n; ++i) {
            gradient.floats().put(i, 1);
        }
        final Gate gate = new Gate();
        final float expected;
        try (Optimizer opt = Optimizer.adamW(Params.of("w", weight), List.of(gradient)).build();
                Saver saver = Saver.at(null, root).whenBusy(Saver.WhenBusy.REPLACE).copyOnDemand(true).progress(gate)
                        .open()) {
            final State state = State.of("w", weight).with("optim", opt);
            saver.saveAsync(1, state);
            assertTrue(Gate.awaited(gate.reached));
            opt.step();
            expected = weight.floats().get(0);
            saver.saveAsync(2, state); // waits for the first one, so that nothing of it is copied in the background
            opt.step();
            assertNotEquals(expected, weight.floats().get(n - 1));
            gate.opened.countDown();
        }
        try (Checkpoint checkpoint = Checkpoint.open(root)) {
            assertEquals(2, checkpoint.step());
            final float[] saved = new float[n];
            final float[] wanted = new float[n];
            Arrays.fill(wanted, expected);
            checkpoint.read("w").floats().get(saved);
            assertArrayEquals(wanted, saved);
        }
    }

    @Test
    void whatIsWrittenAfterTheFirstFenceIsNotSaved() throws Exception {
        final int n = 1 << 20;
        final Tensor weight = Tensor.zeros(DType.F32, n);
        final Tensor gradient = Tensor.zeros(DType.F32, n);
        final Gate gate = new Gate(); // holds the save before its first byte
        try (Optimizer opt = Optimizer.adamW(Params.of("w", weight), List.of(gradient)).build();
                Saver saver = Saver.at(null, root).copyOnDemand(true).progress(gate).open()) {
            final Saver.Save save = saver.saveAsync(1, State.of("w", weight).with("optim", opt));
            save.staged().get(Patience.seconds(60), TimeUnit.SECONDS);
            assertFalse(save.isDone());
            for (int i = 0; i < n; ++i) {
                weight.floats().put(i, -1);
            }
            gate.opened.countDown();
            assertEquals(1, save.get(Patience.seconds(60), TimeUnit.SECONDS).step());
        }
        try (Checkpoint checkpoint = Checkpoint.open(root)) {
            final float[] saved = new float[n];
            checkpoint.read("w").floats().get(saved);
            assertArrayEquals(new float[n], saved);
        }
    }

    /** Phases in the order in which they were told; each has to go from nothing to all. */
    private static List<Progress.Phase> phases(List<Object[]> told) {
        final Map<Progress.Phase, List<long[]>> found = new LinkedHashMap<>();
        for (Object[] facts : told) {
            found.computeIfAbsent((Progress.Phase) facts[0], p -> new ArrayList<>())
                    .add(new long[] {(Long) facts[1], (Long) facts[2]});
        }
        told.clear();
        found.forEach((phase, counts) -> {
            final long total = counts.get(0)[1];
            assertEquals(phase == Progress.Phase.COMMIT, total == 0, phase.toString());
            assertEquals(0, counts.get(0)[0]);
            assertEquals(total, counts.get(counts.size() - 1)[0]);
            for (int i = 1; i < counts.size(); ++i) {
                assertTrue(counts.get(i - 1)[0] <= counts.get(i)[0] && counts.get(i)[1] == total, phase.toString());
            }
        });
        return new ArrayList<>(found.keySet());
    }

    @Test
    void aSaveInTheBackgroundThatFailsIsToldByItsFutureAndOnceByTheNextCall() throws Exception {
        final Path here = root.resolve("saves");
        final Path away = root.resolve("away");
        try (Saver saver = Saver.at(null, here).open()) {
            saver.save(1, state(1));
            Files.move(here, away);
            Files.writeString(here, "no directory");
            final CompletableFuture<Saver.Commit> failing = saver.saveAsync(2, state(2));
            final Throwable told =
                    assertThrows(ExecutionException.class, () -> failing.get(Patience.seconds(60), TimeUnit.SECONDS)).getCause();
            assertInstanceOf(TesseraIoException.class, told);
            assertTrue(told.getMessage().contains(here.toString()), told.getMessage());
            assertThrows(TesseraIoException.class, () -> saver.saveAsync(3, state(3)));
            Files.delete(here);
            Files.move(away, here);
            saver.saveAsync(4, state(4)).get(Patience.seconds(60), TimeUnit.SECONDS);
            assertEquals(4, saver.resume(state(0)));
        }
    }

    @Test
    void progressIsToldFromNothingToAllInEachPhase() throws Exception {
        final List<Object[]> told = Collections.synchronizedList(new ArrayList<>());
        final Progress progress = (phase, done, total) -> told.add(new Object[] {phase, done, total});
        try (Saver saver = Saver.at(null, root).progress(progress).open()) {
            saver.save(1, state(1));
            assertEquals(List.of(Progress.Phase.WRITE, Progress.Phase.COMMIT), phases(told));
            saver.saveAsync(2, state(2));
            saver.await();
            assertEquals(List.of(Progress.Phase.STAGE, Progress.Phase.WRITE, Progress.Phase.COMMIT), phases(told));
            assertEquals(2, saver.resume(state(0)));
            assertEquals(List.of(Progress.Phase.READ), phases(told));
        }
        try (Checkpoint checkpoint = Checkpoint.open(root)) {
            checkpoint.load(state(0), new LoadOptions().progress(progress));
            assertEquals(List.of(Progress.Phase.READ), phases(told));
            checkpoint.verify(Checkpoint.Verify.FULL, progress);
            assertEquals(List.of(Progress.Phase.VERIFY), phases(told));
        }
    }

    /** What nobody but the test throws. */
    private static final class Mine extends RuntimeException {
        private static final long serialVersionUID = 1;
    }

    private static Progress throwing(Mine mine, Progress.Phase in) {
        final AtomicBoolean thrown = new AtomicBoolean();
        return (phase, done, total) -> {
            if (phase == in && thrown.compareAndSet(false, true)) {
                throw mine;
            }
        };
    }

    @Test
    void whatACallbackThrowsComesBackAndTheCallHasDoneItsWork() throws Exception {
        for (Progress.Phase phase : Progress.Phase.values()) {
            final Mine mine = new Mine();
            final Progress progress = throwing(mine, phase);
            final float[] loaded = new float[1];
            final Executable call = () -> {
                try (Saver saver = Saver.at(null, root).progress(progress).open()) {
                    saver.saveAsync(phase.ordinal() + 1, state(7));
                    saver.await();
                }
                try (Checkpoint checkpoint = Checkpoint.open(root)) {
                    final Tensor tensor = Tensor.zeros(DType.F32, 3);
                    try {
                        checkpoint.load(State.of("w", tensor), new LoadOptions().progress(progress));
                    } finally {
                        loaded[0] = tensor.floats().get(0);
                    }
                    checkpoint.verify(Checkpoint.Verify.FULL, progress);
                }
            };
            assertSame(mine, assertThrows(Mine.class, call), phase.toString());
            assertEquals(phase.ordinal() + 1, steps().size(), "the save of the run was committed");
            assertEquals(phase.ordinal() < Progress.Phase.READ.ordinal() ? 0f : 7f, loaded[0]);
        }
    }

    @Test
    void whatTheLibrarySaysComesBeforeWhatACallbackThrows() throws Exception {
        try (Saver saver = Saver.at(null, root).open()) {
            saver.save(1, state(1));
        }
        try (Checkpoint checkpoint = Checkpoint.open(root)) {
            try (Stream<Path> files = Files.list(checkpoint.path())) {
                final Path file = files.filter(p -> p.toString().endsWith(".safetensors")).findFirst().orElseThrow();
                Files.write(file, new byte[] {1}, StandardOpenOption.APPEND);
            }
            assertThrows(TesseraCorruptException.class, () -> checkpoint.verify(
                    Checkpoint.Verify.FULL, throwing(new Mine(), Progress.Phase.VERIFY)));
        }
    }

    @Test
    void ranksThatHoldOthersAreToldWhereItIsAskedFor() throws Exception {
        Ranks.run(2, comm -> {
            try (Saver saver = Saver.at(comm, root).checkReplicas(true).open()) {
                final String message = assertThrows(
                        TesseraMismatchException.class, () -> saver.save(1, state(comm.rank()))).getMessage();
                assertTrue(message.contains("tensor 'w' differs"), message);
                assertTrue(message.contains("rank 1 differs from rank 0"), message);
                saver.save(1, state(1));
            }
        });
    }

    @Test
    void allRanksStopAtTheSameStepWhenOneIsTold() throws Exception {
        Ranks.run(3, comm -> {
            try (Saver saver = Saver.at(comm, root).open()) {
                for (long step = 1; step <= 5; ++step) {
                    final boolean told = step == 3 && comm.rank() == 1;
                    assertEquals(step >= 3, told ? saver.shouldStop(step, true) : saver.shouldStop(step));
                }
            }
        });
    }

    @Test
    void ranksThatAskAtDifferentStepsAreToldSo() throws Exception {
        Ranks.run(2, comm -> {
            try (Saver saver = Saver.at(comm, root).open()) {
                final String message = assertThrows(
                        TesseraMismatchException.class, () -> saver.shouldStop(5 + comm.rank())).getMessage();
                assertTrue(message.contains("5 to 6"), message);
            }
        });
    }
}
