package dev.tessera;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertNotNull;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import dev.tessera.hadoop.HadoopStorage;
import java.io.FileNotFoundException;
import java.io.IOException;
import java.nio.ByteBuffer;
import java.nio.file.Path;
import java.util.ArrayList;
import java.util.List;
import java.util.Map;
import java.util.TreeMap;
import java.util.TreeSet;
import java.util.concurrent.ConcurrentHashMap;
import java.util.concurrent.atomic.AtomicLong;
import org.apache.hadoop.conf.Configuration;
import org.apache.hadoop.fs.FileSystem;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.io.TempDir;

class StorageTest {
    private static final int ROWS = 3001;
    private static final int COLUMNS = 1031;

    @TempDir
    Path directory;

    /** Objects in a map; a method whose name is in {@link #errors} throws what stands there. */
    static class MapStorage implements Storage {
        final Map<String, byte[]> objects = new TreeMap<>();
        final Map<String, Exception> errors = new ConcurrentHashMap<>();
        final AtomicLong bytesRead = new AtomicLong();
        private final boolean anyOrder;

        MapStorage(boolean anyOrder) {
            this.anyOrder = anyOrder;
        }

        private void enter(String method) throws Exception {
            final Exception error = errors.get(method);
            if (error != null) {
                throw error;
            }
        }

        private static byte[] bytes(ByteBuffer data) {
            final byte[] copy = new byte[data.remaining()];
            data.get(copy);
            return copy;
        }

        @Override
        public boolean partsInAnyOrder() {
            return anyOrder;
        }

        @Override
        public boolean putsIfAbsent() {
            return anyOrder;
        }

        @Override
        public long partBytes() {
            return 65536;
        }

        @Override
        public synchronized Status status(String key) throws Exception {
            enter("status");
            if (objects.containsKey(key)) {
                return Status.object(objects.get(key).length, System.currentTimeMillis());
            }
            return objects.keySet().stream().anyMatch(k -> k.startsWith(key + "/")) ? Status.directory() : null;
        }

        @Override
        public synchronized Reader open(String key) throws Exception {
            enter("open");
            final byte[] data = objects.get(key);
            return data == null ? null : new Reader() {
                @Override
                public long size() {
                    return data.length;
                }

                @Override
                public int read(long offset, ByteBuffer into) throws Exception {
                    enter("read");
                    final int size = (int) Math.min(into.remaining(), data.length - offset);
                    into.put(data, (int) offset, size);
                    bytesRead.addAndGet(size);
                    return size;
                }

                @Override
                public void close() {}
            };
        }

        @Override
        public synchronized boolean put(String key, ByteBuffer data, boolean ifAbsent) throws Exception {
            enter("put");
            if (ifAbsent && objects.containsKey(key)) {
                return false;
            }
            objects.put(key, bytes(data));
            return true;
        }

        @Override
        public Upload begin(String key, long size) throws Exception {
            enter("begin");
            return new Upload() {
                private final Map<Long, byte[]> parts = new TreeMap<>();

                @Override
                public synchronized void part(long index, long offset, ByteBuffer data) throws Exception {
                    enter("part");
                    if (!anyOrder && index != parts.size()) {
                        throw new IllegalStateException("part " + index + " is not the next one");
                    }
                    parts.put(index, bytes(data));
                }

                @Override
                public void finish() throws Exception {
                    enter("finish");
                    final ByteBuffer whole = ByteBuffer.allocate((int) size);
                    parts.values().forEach(whole::put);
                    whole.flip();
                    synchronized (MapStorage.this) {
                        objects.put(key, bytes(whole));
                    }
                }

                @Override
                public void drop() {}
            };
        }

        @Override
        public synchronized List<String> list(String key) throws Exception {
            enter("list");
            final TreeSet<String> names = new TreeSet<>();
            for (String other : objects.keySet()) {
                if (other.startsWith(key + "/")) {
                    names.add(other.substring(key.length() + 1).split("/", 2)[0]);
                }
            }
            return new ArrayList<>(names);
        }

        @Override
        public synchronized void remove(String key) throws Exception {
            enter("remove");
            objects.remove(key);
        }
    }

    /** This rank's rows of a matrix whose element (i, j) is i + j / 2 + value. */
    private static Tensor fill(Tensor part, long first, float value) {
        for (int i = 0; i < part.shape()[0]; ++i) {
            for (int j = 0; j < COLUMNS; ++j) {
                part.floats().put(i * COLUMNS + j, first + i + j / 2f + value);
            }
        }
        return part;
    }

    private static void saveAndLoad(Storage storage) throws Exception {
        Ranks.run(3, comm -> {
            try (Layout layout = Layout.of(new long[] {ROWS, COLUMNS}, new int[] {3}, Placement.shard(0));
                    Saver saver = Saver.at(comm, Path.of("runs/a")).keepLatest(2).storage(storage).open()) {
                final Box box = layout.boxes(comm.rank()).get(0);
                final Tensor part = Tensor.zeros(DType.F32, box.sizes());
                final State state = new State().with("w", layout, DType.F32, comm.rank(), List.of(part));
                for (int step = 1; step <= 3; ++step) {
                    fill(part, box.offsets()[0], step);
                    if (step % 2 == 0) {
                        saver.save(step, state);
                    } else {
                        saver.saveAsync(step, state).join();
                    }
                }
            }
        });
        try (Checkpoint checkpoint = Checkpoint.open(storage, "runs/a/latest")) {
            assertEquals(3, checkpoint.step());
            checkpoint.verify(Checkpoint.Verify.FULL);
            final Tensor whole = checkpoint.read("w");
            assertEquals(ROWS - 1 + 1 + 3f, whole.floats().get((ROWS - 1) * COLUMNS + 2));
        }
        Ranks.run(2, comm -> {
            try (Layout layout = Layout.of(new long[] {ROWS, COLUMNS}, new int[] {2}, Placement.shard(0));
                    Saver saver = Saver.at(comm, Path.of("runs/a")).storage(storage).open()) {
                final Box box = layout.boxes(comm.rank()).get(0);
                final Tensor part = Tensor.zeros(DType.F32, box.sizes());
                final State state = new State().with("w", layout, DType.F32, comm.rank(), List.of(part));
                assertEquals(3, saver.resume(state));
                assertEquals(box.offsets()[0] + 3f, part.floats().get(0));
            }
        });
        assertEquals(3, storage.list("runs/a").size(), storage.list("runs/a").toString());
        assertThrows(TesseraNotFoundException.class, () -> Checkpoint.open(storage, "runs/b"));
    }

    @Test
    void aStorageOfEitherKindHoldsCheckpoints() throws Exception {
        saveAndLoad(new MapStorage(true));
        saveAndLoad(new MapStorage(false));
    }

    @Test
    void ranksThatLoadTogetherReadEachByteOnce() throws Exception {
        final int ranks = 3;
        final int saved = 12 << 20;
        final MapStorage storage = new MapStorage(true);
        for (String root : List.of("a", "b")) {
            final Tensor w = Tensor.zeros(DType.F32, saved / 4);
            w.floats().put(saved / 4 - 1, 2f);
            try (Saver saver = Saver.at(null, Path.of(root)).storage(storage).open()) {
                saver.save(1, State.of("w", w));
            }
        }
        for (boolean together : new boolean[] {true, false}) {
            final long before = storage.bytesRead.get();
            Ranks.run(ranks, comm -> {
                final Tensor w = Tensor.zeros(DType.F32, saved / 4);
                try (Checkpoint checkpoint = Checkpoint.open(storage, "a")) {
                    checkpoint.load(State.of("w", w), new LoadOptions().comm(together ? comm : null));
                }
                assertEquals(2f, w.floats().get(saved / 4 - 1));
            });
            final long read = storage.bytesRead.get() - before - (together ? 1 : ranks) * (long) saved;
            assertTrue(read >= 0 && read <= ranks * 65536, "beyond the data " + read); // each one's manifest and header
        }
        Ranks.run(2, comm -> {
            try (Checkpoint checkpoint = Checkpoint.open(storage, comm.rank() == 0 ? "a" : "b")) {
                final State state = State.of("w", Tensor.zeros(DType.F32, saved / 4));
                final LoadOptions options = new LoadOptions().comm(comm);
                final String said = assertThrows(TesseraMismatchException.class, () -> checkpoint.load(state, options))
                        .getMessage();
                assertTrue(said.contains("rank 1 loads b/step-00000001-"), said);
            }
        });
    }

    @Test
    void hadoopsLocalFilesHoldCheckpoints() throws Exception {
        final Configuration configuration = new Configuration();
        try (FileSystem files = FileSystem.newInstance(new java.net.URI("file:///"), configuration)) {
            final Storage storage = new HadoopStorage(files, new org.apache.hadoop.fs.Path(directory.toUri()));
            saveAndLoad(storage);
            assertThrows(TesseraInvalidStateException.class, () -> {
                try (Saver first = Saver.at(null, Path.of("runs/a")).storage(storage).open()) {
                    assertNotNull(first);
                    Saver.at(null, Path.of("runs/a")).storage(storage).open();
                }
            });
            final String newest = storage.list("runs/a").stream().filter(n -> n.startsWith("step-00000003")).findFirst().get();
            storage.remove("runs/a/" + newest + "/rank-00001.safetensors");
            try (Checkpoint checkpoint = Checkpoint.open(storage, "runs/a")) {
                assertThrows(TesseraCorruptException.class, () -> checkpoint.read("w"));
            }
        }
    }

    @Test
    void aCommitOpensWhatWasSaved() throws Exception {
        final MapStorage storage = new MapStorage(true);
        try (Saver saver = Saver.at(null, Path.of("/r")).storage(storage).open()) {
            final State state = State.of("w", Tensor.zeros(DType.F32, 3));
            final Saver.Commit first = saver.save(1, state);
            saver.save(2, state);
            try (Checkpoint checkpoint = first.open()) {
                assertEquals(1, checkpoint.step());
            }
        }
    }

    @Test
    void whatAMethodThrowsIsToldOnEveryRank() throws Exception {
        final Object[][] cases = {
            {new IOException("the disk melted"), ErrorCode.IO},
            {new FileNotFoundException("no bucket"), ErrorCode.NOT_FOUND},
            {new java.nio.file.AccessDeniedException("k"), ErrorCode.PERMISSION},
            {new java.util.concurrent.TimeoutException("slow"), ErrorCode.TIMEOUT},
            {new IllegalStateException("grün"), ErrorCode.USER},
        };
        for (String method : new String[] {"put", "begin", "part", "finish", "list"}) {
            for (Object[] one : cases) {
                final MapStorage storage = new MapStorage(false);
                Ranks.run(2, comm -> {
                    try (Layout layout = Layout.of(new long[] {ROWS, 64}, new int[] {2}, Placement.shard(0));
                            Saver saver = Saver.at(comm, Path.of("r")).storage(storage).open()) {
                        final Tensor part = Tensor.zeros(DType.F32, layout.boxes(comm.rank()).get(0).sizes());
                        final State state = new State().with("w", layout, DType.F32, comm.rank(), List.of(part));
                        saver.save(1, state);
                        comm.barrier();
                        if (comm.rank() == 0) {
                            storage.errors.put(method, (Exception) one[0]);
                        }
                        comm.barrier();
                        final TesseraException error =
                                assertThrows(TesseraException.class, () -> saver.save(2, state));
                        assertEquals(one[1], error.code(), method + ": " + error);
                        assertTrue(error.getMessage().contains(((Exception) one[0]).getMessage()), error.getMessage());
                        assertTrue(error.getMessage().contains("storage's " + method), error.getMessage());
                        comm.barrier();
                        storage.errors.clear();
                    }
                });
                try (Checkpoint checkpoint = Checkpoint.open(storage, "r")) {
                    assertEquals(1, checkpoint.step());
                    storage.errors.put("read", (Exception) one[0]);
                    assertEquals(one[1], assertThrows(TesseraException.class, () -> checkpoint.read("w")).code());
                }
            }
        }
    }
}
