package dev.tessera;

import static org.junit.jupiter.api.Assertions.assertArrayEquals;
import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertFalse;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import java.io.IOException;
import java.nio.channels.FileChannel;
import java.nio.file.Files;
import java.nio.file.Path;
import java.nio.file.StandardOpenOption;
import java.time.Duration;
import java.util.ArrayList;
import java.util.List;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.TimeUnit;
import java.util.stream.Collectors;
import java.util.stream.Stream;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.io.TempDir;

class CheckpointTest {
    @TempDir
    Path root;

    private static Tensor ramp(int n) {
        final Tensor tensor = Tensor.zeros(DType.F32, n);
        for (int i = 0; i < n; ++i) {
            tensor.floats().put(i, i);
        }
        return tensor;
    }

    private static Tensor filled(int n, float value) {
        final Tensor tensor = Tensor.zeros(DType.F32, n);
        for (int i = 0; i < n; ++i) {
            tensor.floats().put(i, value);
        }
        return tensor;
    }

    /** A checkpoint of one rank with a tensor "w" of n floats and a value. */
    private Path save(int n) {
        try (Saver saver = Saver.at(null, root).open()) {
            saver.save(3, State.of("w", ramp(n)).put("note", "hello"));
        }
        try (Checkpoint checkpoint = Checkpoint.open(root)) {
            return checkpoint.path();
        }
    }

    private static Path dataFile(Path checkpoint) throws IOException {
        try (Stream<Path> files = Files.list(checkpoint)) {
            return files.filter(p -> p.toString().endsWith(".safetensors")).findFirst().orElseThrow();
        }
    }

    @Test
    void namesOfAnyLanguageComeBackAndHalfACharacterIsRefused() {
        final String name = "größe.権重.\ud83d\ude00";
        try (Saver saver = Saver.at(null, root.resolve(name)).open()) {
            saver.save(1, State.of(name, ramp(3)).put("note " + name, name));
            try (Checkpoint checkpoint = Checkpoint.open(root.resolve(name))) {
                assertEquals(2f, checkpoint.read(name).floats().get(2));
            }
            final State half = State.of("whole", ramp(3));
            for (String bad : new String[] {"\ud83d", "a\ude00b", "\ude00\ud83d"}) {
                final String message =
                        assertThrows(IllegalArgumentException.class, () -> half.with(bad, ramp(1))).getMessage();
                assertTrue(message.contains("surrogate"), message);
            }
        }
    }

    /** Saves under a limit of the size of files, which stands for a full disk; for {@link #aDiskThatIsFull}. */
    public static final class FullDisk {
        private FullDisk() {}

        public static void main(String[] args) {
            final Tensor small = ramp(10);
            try (Saver saver = Saver.at(null, Path.of(args[0])).open()) {
                saver.save(1, State.of("w", small));
                final State big = State.of("w", ramp(4 << 20));
                for (int i = 0; i < 2; ++i) {
                    try {
                        if (i == 0) {
                            saver.save(2, big);
                        } else {
                            saver.saveAsync(2, big);
                            saver.await();
                        }
                        System.out.println("saved?");
                    } catch (TesseraIoException error) {
                        System.out.println("refused: " + error);
                    }
                }
                small.floats().put(0, 77);
                System.out.println("back to step " + saver.resume(State.of("w", small)) + ", " + small.floats().get(0));
                saver.save(3, State.of("w", small));
            }
        }
    }

    @Test
    void aDiskThatIsFull() throws Exception {
        final List<String> command = new ArrayList<>(List.of("bash", "-c", "ulimit -f 2048 && exec \"$@\"", "limited"));
        command.addAll(Jvm.command(FullDisk.class.getName(), root.toString()));
        final String out = Jvm.run(0, command);
        assertEquals(2, out.split("refused: dev.tessera.TesseraIoException: ", -1).length - 1, out);
        assertTrue(out.contains("back to step 1, 0.0"), out);
        try (Checkpoint checkpoint = Checkpoint.open(root)) {
            assertEquals(3, checkpoint.step());
        }
    }

    @Test
    void trainingGoesOnWhereItStoodAtAnotherWorldSize() throws Exception {
        final float[][] expected = new float[1][];
        final long[] lr = new long[1];
        Ranks.run(3, comm -> {
            final Tensor weight = ramp(1000);
            try (Ddp ddp = Ddp.create(comm, Params.of("fc.weight", weight));
                    Optimizer opt = Optimizer.adamW(ddp).lr(0.1).build();
                    Sampler data = Sampler.of(comm, 90).seed(7).build();
                    Saver saver = Saver.at(comm, root).keepLatest(2).timeout(Ranks.DEADLINE).writerVersion("test").open()) {
                final State state = State.of("model", ddp).with("optim", opt).with("data", data).put("note", List.of(1, "x"));
                assertEquals(0, saver.resume(state), "nothing yet");
                final List<CompletableFuture<Saver.Commit>> saves = new ArrayList<>();
                for (long step = 0; step < 4; ++step) {
                    data.batch(5);
                    ddp.grad(0).put(0, 1);
                    ddp.readyAll();
                    ddp.await();
                    opt.step();
                    saves.add(saver.saveAsync(step + 1, state.metric("loss", 1.0 / (step + 1))));
                }
                for (int i = 0; i < saves.size(); ++i) {
                    assertEquals(i + 1, saves.get(i).get(Patience.seconds(20), TimeUnit.SECONDS).step());
                }
                saver.await();
                comm.barrier();
                if (comm.rank() == 0) {
                    expected[0] = new float[1000];
                    weight.floats().get(expected[0]);
                    lr[0] = data.consumed();
                    try (Checkpoint third = saves.get(2).get().open()) { // not the newest
                        assertEquals(3, third.step());
                    }
                    assertThrows(TesseraNotFoundException.class, () -> saves.get(0).get().open()); // retention
                }
                comm.barrier();
            }
        });
        Ranks.run(2, comm -> {
            final Tensor weight = Tensor.zeros(DType.F32, 1000);
            try (Ddp ddp = Ddp.create(comm, Params.of("fc.weight", weight));
                    Optimizer opt = Optimizer.adamW(ddp).lr(0.7).build();
                    Sampler data = Sampler.of(comm, 90).seed(7).build();
                    Saver saver = Saver.at(comm, root).open()) {
                final State state =
                        State.of("model", ddp).with("optim", opt).with("data", data).put("note", (Object) null);
                assertEquals(4, saver.resume(state));
                final float[] loaded = new float[1000];
                weight.floats().get(loaded);
                assertArrayEquals(expected[0], loaded);
                assertEquals(0.1, opt.lr(), 1e-12);
                assertEquals(4, opt.steps());
                assertEquals(lr[0], data.consumed());
                assertEquals(List.of(1L, "x"), state.get("note"));
                assertEquals(root, saver.root());
            }
        });
    }

    @Test
    void oneRankSavesAndAllLoadAfterABarrier() throws Exception {
        Ranks.run(3, comm -> {
            final Tensor weight = ramp(1000);
            try (Ddp ddp = Ddp.create(comm, Params.of("fc.weight", weight))) {
                final State state = State.of("model", ddp);
                if (comm.rank() == 0) {
                    try (Saver saver = Saver.at(null, root).open()) {
                        saver.save(1, state);
                    }
                }
                comm.barrier();
                weight.floats().put(7, -1).put(999, comm.rank());
                try (Checkpoint checkpoint = Checkpoint.open(root)) {
                    checkpoint.load(state);
                }
                assertEquals(7f, weight.floats().get(7));
                assertEquals(999f, weight.floats().get(999));
            }
        });
    }

    @Test
    void shardsOfALayout() throws Exception {
        Ranks.run(2, comm -> {
            try (Layout rows = Layout.of(new long[] {3, 4}, new int[] {2}, Placement.shard(0));
                    Saver saver = Saver.at(comm, root).open()) {
                final int mine = comm.rank() == 0 ? 2 : 1;
                final Tensor piece = Tensor.zeros(DType.F32, mine, 4);
                for (int i = 0; i < piece.numel(); ++i) {
                    piece.floats().put(i, comm.rank() * 8 + i);
                }
                final State state = new State().with("table", rows, DType.F32, comm.rank(), List.of(piece));
                assertThrows(IllegalArgumentException.class,
                        () -> new State().with("table", rows, DType.F32, comm.rank(), List.of()));
                final Saver.Commit commit = saver.save(1, state);
                assertEquals(1, commit.step());
                assertEquals(root, commit.root());
            }
        });
        try (Checkpoint checkpoint = Checkpoint.open(root)) {
            assertEquals(List.of("table F32[3, 4]"),
                    checkpoint.tensors().stream().map(Object::toString).collect(Collectors.toList()));
            assertEquals(11f, checkpoint.read("table").floats().get(11));
            checkpoint.verify(Checkpoint.Verify.FULL);
            checkpoint.verify(Checkpoint.Verify.HEADERS);
            assertTrue(checkpoint.manifest().contains("\"java\""), checkpoint.manifest());
            assertTrue(checkpoint.manifest().endsWith("\"}\n") || checkpoint.manifest().endsWith("\"}"));
        }
    }

    private static void assertCounted(int begin, int end, Tensor tensor) {
        final float[] expected = new float[end - begin];
        for (int i = begin; i < end; ++i) {
            expected[i - begin] = i;
        }
        final float[] found = new float[(int) tensor.numel()];
        tensor.floats().get(found);
        assertArrayEquals(expected, found);
    }

    /** By four of its versions, with tests/golden/torch_dcp/make.py: read whole, and loaded as either of two ranks would. */
    @Test
    void whatPyTorchWroteIsLoaded() throws Exception {
        final List<Path> versions;
        try (Stream<Path> found = Files.list(Path.of("../../tests/golden/torch_dcp"))) {
            versions = found.filter(path -> path.getFileName().toString().startsWith("2.")).collect(Collectors.toList());
        }
        assertTrue(versions.size() >= 4, versions.toString());
        for (Path version : versions) {
            for (String name : List.of("dcp", "save.pt")) {
                try (Checkpoint checkpoint = Checkpoint.open(version.resolve(name));
                        Layout byRows = Layout.of(new long[] {7, 5}, new int[] {2}, Placement.shard(0))) {
                    assertCounted(0, 35, checkpoint.read("model.rows"));
                    if (name.equals("dcp")) {
                        assertCounted(0, 15, checkpoint.read("model.columns"));
                    } else {
                        assertThrows(TesseraNotFoundException.class, () -> checkpoint.read("model.columns"));
                    }
                    checkpoint.verify(Checkpoint.Verify.FULL);
                    for (int rank = 0; rank < 2; ++rank) {
                        final Tensor rows = Tensor.zeros(DType.F32, rank == 0 ? 4 : 3, 5);
                        final Tensor scalar = Tensor.zeros(DType.I64);
                        final State state = new State().with("model.rows", byRows, DType.F32, rank, List.of(rows))
                                .with("model.scalar", scalar).put("step", 0).put("note", "");
                        checkpoint.load(state, new LoadOptions().allowUnexpected(true));
                        assertCounted(20 * rank, rank == 0 ? 20 : 35, rows);
                        assertEquals(-3, scalar.longs().get(0));
                        assertEquals(7, state.getLong("step"));
                        assertEquals("größer", state.get("note"));
                    }
                }
            }
        }
    }

    @Test
    void aShardWithoutRowsMayBeGivenAsAnEmptyTensor(@TempDir Path root) throws Exception {
        Ranks.run(3, comm -> {
            try (Layout layout = Layout.of(new long[] {2, 3}, new int[] {3}, Placement.shard(0));
                    Saver saver = Saver.at(comm, root).open()) {
                final int rank = comm.rank();
                final Tensor part = Tensor.zeros(DType.F32, rank < 2 ? 1 : 0, 3);
                for (int i = 0; i < part.numel(); ++i) {
                    part.floats().put(i, 3 * rank + i);
                }
                saver.save(1, new State().with("w", layout, DType.F32, rank, List.of(part)));
            }
        });
        try (Checkpoint checkpoint = Checkpoint.open(root)) {
            assertCounted(0, 6, checkpoint.read("w"));
        }
    }

    @Test
    void isExportedByOneProcessOrByAllRanks(@TempDir Path out) throws Exception {
        save(100);
        final Path alone = out.resolve("alone");
        try (Checkpoint checkpoint = Checkpoint.open(root)) {
            final List<Long> told = new ArrayList<>();
            checkpoint.export(alone, new ExportOptions().maxFileBytes(1000).progress((phase, done, total) -> {
                assertEquals(Progress.Phase.WRITE, phase);
                told.add(done - total);
            }));
            assertEquals(0, told.get(told.size() - 1));
            assertThrows(TesseraInvalidArgumentException.class, () -> checkpoint.export(alone, new ExportOptions()));
        }
        final Path together = out.resolve("torch_dcp");
        final Path file = out.resolve("torch_save");
        Ranks.run(2, comm -> {
            try (Checkpoint checkpoint = Checkpoint.open(root)) {
                for (Path path : List.of(together, file)) {
                    checkpoint.export(comm, path,
                            new ExportOptions().format(path.getFileName().toString()).under("").timeout(Patience.of(Duration.ofSeconds(30))));
                }
            }
        });
        for (Path path : List.of(alone, alone.resolve("model.safetensors"), together, file, file.resolve("model.pt"))) {
            try (Checkpoint checkpoint = Checkpoint.open(path)) {
                assertEquals(99f, checkpoint.read("w").floats().get(99));
                checkpoint.verify(Checkpoint.Verify.FULL);
            }
        }
    }

    @Test
    void dtypesOfCheckpointsAloneAreSavedAndRead() {
        final DType[] dtypes = {DType.U16, DType.U32, DType.U64, DType.F8_E4M3, DType.F8_E5M2, DType.F8_E8M0, DType.C64};
        final State state = new State();
        for (DType dtype : dtypes) {
            final Tensor tensor = Tensor.zeros(dtype, 3);
            tensor.bytes().put(dtype.size(), (byte) 7);
            state.with(dtype.name(), tensor);
        }
        try (Saver saver = Saver.at(null, root).open()) {
            saver.save(1, state);
        }
        try (Checkpoint checkpoint = Checkpoint.open(root)) {
            for (DType dtype : dtypes) {
                final Tensor read = checkpoint.read(dtype.name());
                assertEquals(dtype, read.dtype());
                assertEquals(7, read.bytes().get(dtype.size()));
            }
        }
    }

    @Test
    void loadsSayWhatDiffers() {
        save(8);
        try (Checkpoint checkpoint = Checkpoint.open(root)) {
            final Tensor w = Tensor.zeros(DType.F32, 8);
            checkpoint.load(State.of("w", w).put("note", ""));
            assertEquals(7f, w.floats().get(7));
            final Tensor other = Tensor.zeros(DType.F32, 9);
            final TesseraMismatchException error = assertThrows(TesseraMismatchException.class,
                    () -> checkpoint.load(State.of("w", other).with("absent", Tensor.zeros(DType.F32, 1)).put("note", "")));
            assertTrue(error.getMessage().contains("absent") && error.getMessage().contains("w"), error.getMessage());
            assertThrows(TesseraMismatchException.class, () -> checkpoint.load(State.of("w", w)), "the value is left out");
            final LoadReport lax = checkpoint.load(State.of("w", w).with("absent", Tensor.zeros(DType.F32, 1)),
                    new LoadOptions().allowMissing(true).allowUnexpected(true).verify(false));
            assertEquals(List.of("absent"), lax.missing());
            assertEquals(List.of("note"), lax.unexpected());
            assertFalse(lax.verified());
            final Tensor wide = Tensor.zeros(DType.F64, 8);
            assertThrows(TesseraMismatchException.class, () -> checkpoint.load(State.of("w", wide).put("note", "")));
            final LoadReport cast =
                    checkpoint.load(State.of("w", wide).put("note", ""), new LoadOptions().allowCast(true));
            assertEquals(7.0, wide.doubles().get(7));
            assertEquals("missing [], unexpected [], cast [w: F32 to F64], left alone [], verified", cast.toString());
            assertEquals("w", cast.cast().get(0).name());
            assertEquals(DType.F32, cast.cast().get(0).saved());
            assertEquals(DType.F64, cast.cast().get(0).here());
            assertThrows(TesseraMismatchException.class, () -> checkpoint.read("w", Tensor.zeros(DType.F32, 4, 2)));
            assertThrows(TesseraNotFoundException.class, () -> checkpoint.read("v"));
        }
    }

    /** Two names of the same memory. */
    @Test
    void tiedTensorsAreSavedOnceLoadApartAndAreTiedAgain() throws Exception {
        final String isTied = "\"aliases\":{\"head.weight\":\"embed.weight\"}";
        final Tensor shared = filled(1000, 1.5f);
        final State tied = State.of("embed.weight", shared).with("head.weight", shared);
        try (Saver saver = Saver.at(null, root).open()) {
            saver.save(1, tied);
            try (Checkpoint first = Checkpoint.open(root)) {
                assertTrue(first.manifest().contains(isTied), first.manifest());
                assertEquals(List.of("embed.weight", "head.weight"),
                        first.tensors().stream().map(Checkpoint.Entry::name).collect(Collectors.toList()));
                final long once = Files.size(dataFile(first.path()));

                final Tensor embed = filled(1000, 0);
                final Tensor head = filled(1000, 0);
                final State apart = State.of("embed.weight", embed).with("head.weight", head);
                first.load(apart);
                assertEquals(filled(1000, 1.5f).floats(), embed.floats());
                assertEquals(filled(1000, 1.5f).floats(), head.floats());
                head.floats().put(7, 2.5f);
                saver.save(2, apart);
                try (Checkpoint both = Checkpoint.open(root)) {
                    assertEquals(once + 4 * 1000, Files.size(dataFile(both.path())));
                    assertEquals(2.5f, both.read("head.weight").floats().get(7));
                    assertEquals(1.5f, both.read("embed.weight").floats().get(7));
                }

                shared.floats().put(7, 0);
                first.load(tied);
                assertEquals(filled(1000, 1.5f).floats(), shared.floats());
                saver.save(3, tied);
                try (Checkpoint again = Checkpoint.open(root)) {
                    assertTrue(again.manifest().contains(isTied), again.manifest());
                    assertEquals(once, Files.size(dataFile(again.path())));
                }
            }
        }
    }

    @Test
    void namesAreChosenAndRenamed() {
        save(8);
        try (Checkpoint checkpoint = Checkpoint.open(root)) {
            final Tensor weight = Tensor.zeros(DType.F32, 8);
            final Tensor other = Tensor.zeros(DType.F32, 3);
            final State state = State.of("encoder.w", weight).with("head.w", other).put("encoder.note", "");
            final LoadReport report = checkpoint.load(state, new LoadOptions().only("encoder.*").rename("w", "encoder.w")
                    .rename("", "encoder.").rename("w", "head.w"));
            assertEquals(7f, weight.floats().get(7));
            assertEquals("hello", state.get("encoder.note"));
            assertEquals(List.of("head.w"), report.leftAlone());
            assertEquals(List.of(), report.missing());
            assertEquals(List.of(), report.unexpected());
            assertTrue(report.verified());
        }
    }

    @Test
    void namesThatCannotBeLoadedAreRefused() {
        save(8);
        try (Checkpoint checkpoint = Checkpoint.open(root)) {
            final Tensor w = Tensor.zeros(DType.F32, 8);
            final State state = State.of("w", w).put("note", "");
            refusedLoad(TesseraMismatchException.class, "no name of the state matches 'nope.*'", checkpoint, state,
                    new LoadOptions().only("w", "nope.*"));
            refusedLoad(TesseraInvalidArgumentException.class, "only has no pattern", checkpoint, state,
                    new LoadOptions().only());
            refusedLoad(TesseraInvalidArgumentException.class, "a name pattern is empty", checkpoint, state,
                    new LoadOptions().only(""));
            refusedLoad(TesseraInvalidArgumentException.class,
                    "'w' and 'note' of the checkpoint would both be named 'w'", checkpoint, state,
                    new LoadOptions().rename("note", "w"));
            refusedLoad(TesseraInvalidArgumentException.class, "the rule 'w.' -> 'w'", checkpoint, state,
                    new LoadOptions().rename("w.", "w"));
            assertThrows(IllegalArgumentException.class, () -> new LoadOptions().only("a\0"));
            assertThrows(IllegalArgumentException.class, () -> new LoadOptions().rename("\ud83d", "a"));
            assertThrows(NullPointerException.class, () -> new LoadOptions().only("a", null));
            assertEquals(0f, w.floats().get(7));
        }
    }

    private static void refusedLoad(
            Class<? extends TesseraException> type, String told, Checkpoint checkpoint, State state, LoadOptions options) {
        final TesseraException error = assertThrows(type, () -> checkpoint.load(state, options));
        assertTrue(error.getMessage().contains(told), error.getMessage());
    }

    @Test
    void damageIsFound() throws Exception {
        final Path checkpoint = save(300_000);
        final Path file = dataFile(checkpoint);
        try (FileChannel channel = FileChannel.open(file, StandardOpenOption.WRITE)) {
            channel.write(java.nio.ByteBuffer.wrap(new byte[] {1, 2, 3}), channel.size() - 100_000);
        }
        try (Checkpoint damaged = Checkpoint.open(checkpoint)) {
            assertThrows(TesseraCorruptException.class, () -> damaged.read("w"));
            final TesseraCorruptException error =
                    assertThrows(TesseraCorruptException.class, () -> damaged.verify(Checkpoint.Verify.FULL));
            assertTrue(error.getMessage().contains(file.getFileName().toString()), error.getMessage());
            assertThrows(TesseraCorruptException.class,
                    () -> damaged.load(State.of("w", Tensor.zeros(DType.F32, 300_000)).put("note", "")));
        }
    }

    @Test
    void truncatedAndMissingFilesAreFound() throws Exception {
        final Path checkpoint = save(100_000);
        final Path file = dataFile(checkpoint);
        try (FileChannel channel = FileChannel.open(file, StandardOpenOption.WRITE)) {
            channel.truncate(channel.size() / 2);
        }
        isCorrupt(checkpoint, file);
        Files.delete(file);
        isCorrupt(checkpoint, file);
    }

    private static void isCorrupt(Path checkpoint, Path file) {
        final String name = file.getFileName().toString();
        try (Checkpoint damaged = Checkpoint.open(checkpoint)) {
            for (org.junit.jupiter.api.function.Executable read : List.<org.junit.jupiter.api.function.Executable>of(
                    () -> damaged.verify(Checkpoint.Verify.HEADERS), () -> damaged.read("w"),
                    () -> damaged.load(State.of("w", Tensor.zeros(DType.F32, 100_000)).put("note", "")))) {
                final TesseraException error = assertThrows(TesseraCorruptException.class, read);
                assertTrue(error.getMessage().contains(name), error.getMessage());
            }
        }
    }

    @Test
    void aFileTooManyIsToldByVerifyAndNotRead() throws Exception {
        final Path checkpoint = save(4);
        Files.copy(dataFile(checkpoint), checkpoint.resolve("rank-00007.safetensors"));
        try (Checkpoint found = Checkpoint.open(checkpoint)) {
            found.read("w");
            final TesseraException error =
                    assertThrows(TesseraCorruptException.class, () -> found.verify(Checkpoint.Verify.FULL));
            assertTrue(error.getMessage().contains("rank-00007.safetensors"), error.getMessage());
        }
    }

    @Test
    void withoutAManifestThereIsNoCheckpoint() throws Exception {
        final Path checkpoint = save(4);
        final Path manifest = checkpoint.resolve("manifest.json");
        final byte[] text = Files.readAllBytes(manifest);
        text[text.length / 2] ^= 1;
        Files.write(manifest, text);
        assertThrows(TesseraCorruptException.class, () -> Checkpoint.open(checkpoint));
        Files.delete(manifest);
        final TesseraNotFoundException error =
                assertThrows(TesseraNotFoundException.class, () -> Checkpoint.open(checkpoint));
        assertTrue(error.getMessage().contains("manifest"), error.getMessage());
        assertThrows(TesseraNotFoundException.class, () -> Checkpoint.open(root.resolve("nowhere")));
        try (Saver saver = Saver.at(null, root).open()) {
            final State state = State.of("w", ramp(4)).put("note", "");
            assertThrows(TesseraCorruptException.class, () -> saver.resume(state), "latest names what is gone");
            Files.delete(root.resolve("latest"));
            assertEquals(0, saver.resume(state));
        }
    }

    @Test
    void aFailedSaveComesUpWhenTheSaverIsClosed() throws Exception {
        Ranks.run(2, comm -> {
            final Saver saver = Saver.at(comm, root).timeout(Ranks.DEADLINE).open();
            final State state = State.of("w", Tensor.zeros(DType.F32, 4 + comm.rank())); // not the same on both
            boolean thrown = false;
            try {
                saver.saveAsync(1, state);
            } catch (TesseraMismatchException atOnce) {
                thrown = true;
            }
            try {
                saver.close();
            } catch (TesseraMismatchException atTheEnd) {
                thrown = true;
            }
            assertTrue(thrown, "the failed save went unnoticed");
            assertTrue(saver.isClosed());
            comm.barrier(); // the trainer's communicator is as good as before
        });
    }

    @Test
    void oneJobAtATimeOwnsARoot() throws Exception {
        try (Saver first = Saver.at(null, root).open()) {
            final TesseraInvalidStateException error =
                    assertThrows(TesseraInvalidStateException.class, () -> Saver.at(null, root).open());
            assertTrue(error.getMessage().contains(String.valueOf(ProcessHandle.current().pid())), error.getMessage());
            first.save(1, State.of("w", ramp(4)));
        }
        Saver.at(null, root).open().close();
    }

    @Test
    void badArguments() {
        assertThrows(NullPointerException.class, () -> Saver.at(null, null));
        assertThrows(NullPointerException.class, () -> State.of("w", (Tensor) null));
        try (Saver saver = Saver.at(null, root).open()) {
            assertThrows(TesseraInvalidArgumentException.class, () -> saver.save(-1, State.of("w", ramp(4))));
            assertThrows(NullPointerException.class, () -> saver.save(1, null));
            final State closed = State.of("w", ramp(4));
            closed.close();
            assertThrows(IllegalStateException.class, () -> saver.save(1, closed));
            assertThrows(TesseraInvalidArgumentException.class,
                    () -> State.of("w", ramp(4)).with("w", ramp(4)));
        }
        assertThrows(IllegalArgumentException.class, () -> Saver.at(null, root).timeout(Duration.ofDays(1000)));
        assertThrows(TesseraException.class, () -> Saver.at(null, Path.of("/proc/no/checkpoints/here")).open());
    }
}
