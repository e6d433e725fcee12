package dev.tessera.hadoop;

import dev.tessera.Storage;
import java.io.FileNotFoundException;
import java.io.IOException;
import java.nio.ByteBuffer;
import java.util.ArrayList;
import java.util.List;
import java.util.Objects;
import java.util.UUID;
import org.apache.hadoop.fs.FSDataInputStream;
import org.apache.hadoop.fs.FSDataOutputStream;
import org.apache.hadoop.fs.FileAlreadyExistsException;
import org.apache.hadoop.fs.FileContext;
import org.apache.hadoop.fs.FileStatus;
import org.apache.hadoop.fs.FileSystem;
import org.apache.hadoop.fs.Options;
import org.apache.hadoop.fs.Path;
import org.apache.hadoop.fs.StreamCapabilities;

/**
 * A storage over a Hadoop file system: HDFS, a local directory, and others with atomic renames. An object is written
 * under a temporary name, flushed to disk if the file system supports it, and renamed over an existing one.
 *
 * <p>It needs a FileContext for the same URI whose rename replaces files. Object stores behind Hadoop (S3A, ABFS
 * without a hierarchical namespace) copy instead of renaming and are not suitable: use their own client with {@link
 * Storage}.
 */
public final class HadoopStorage implements Storage {
    private final FileSystem files;
    private final FileContext names;
    private final Path root;

    /**
     * A storage below a directory.
     *
     * @param files borrowed; the caller closes it after all savers and checkpoints
     * @param root prefix of all keys
     * @throws IOException if there is no FileContext for the file system
     */
    public HadoopStorage(FileSystem files, Path root) throws IOException {
        this.files = Objects.requireNonNull(files, "files");
        this.root = files.makeQualified(root);
        names = FileContext.getFileContext(files.getUri(), files.getConf());
    }

    private Path path(String key) {
        return key.isEmpty() ? root : new Path(root, key);
    }

    /** Of HDFS; others look whether the name is taken before they rename. */
    @Override
    public boolean putsIfAbsent() {
        return "hdfs".equals(files.getUri().getScheme());
    }

    @Override
    public Status status(String key) throws IOException {
        try {
            final FileStatus found = files.getFileStatus(path(key));
            return found.isDirectory() ? Status.directory() : Status.object(found.getLen(), found.getModificationTime());
        } catch (FileNotFoundException absent) {
            return null;
        }
    }

    @Override
    public Reader open(String key) throws IOException {
        final Path path = path(key);
        try {
            final long size = files.getFileStatus(path).getLen();
            return new OpenFile(files.open(path), size);
        } catch (FileNotFoundException absent) {
            return null;
        }
    }

    @Override
    public boolean put(String key, ByteBuffer data, boolean ifAbsent) throws IOException {
        final Draft draft = new Draft(path(key));
        try {
            draft.write(data);
            return draft.publish(ifAbsent);
        } finally {
            draft.drop();
        }
    }

    @Override
    public Upload begin(String key, long size) throws IOException {
        return new Draft(path(key));
    }

    @Override
    public List<String> list(String key) throws IOException {
        final List<String> found = new ArrayList<>();
        try {
            for (FileStatus status : files.listStatus(path(key))) {
                found.add(status.getPath().getName());
            }
        } catch (FileNotFoundException nothing) {
            found.clear();
        }
        return found;
    }

    @Override
    public void remove(String key) throws IOException {
        files.delete(path(key), false);
    }

    @Override
    public void removeDirectory(String key) throws IOException {
        files.delete(path(key), false);
    }

    /** Positioned reads of one stream, which may come from many threads. */
    private static final class OpenFile implements Reader {
        private final FSDataInputStream stream;
        private final long size;

        OpenFile(FSDataInputStream stream, long size) {
            this.stream = stream;
            this.size = size;
        }

        @Override
        public long size() {
            return size;
        }

        @Override
        public int read(long offset, ByteBuffer into) throws IOException {
            final int wanted = (int) Math.max(0, Math.min(into.remaining(), size - offset));
            final byte[] bytes = new byte[wanted];
            stream.readFully(offset, bytes, 0, wanted);
            into.put(bytes);
            return wanted;
        }

        @Override
        public void close() throws IOException {
            stream.close();
        }
    }

    /** A file next to its final path, until it is renamed to it. */
    private final class Draft implements Upload {
        private final Path place;
        private final Path path;
        private final FSDataOutputStream stream;
        private boolean published;

        Draft(Path place) throws IOException {
            this.place = place;
            // Tessera's garbage collection knows names that end so.
            path = place.suffix(".tmp-" + UUID.randomUUID().toString().substring(0, 8));
            stream = files.create(path, false);
        }

        void write(ByteBuffer data) throws IOException {
            final byte[] bytes = new byte[data.remaining()];
            data.get(bytes);
            stream.write(bytes);
        }

        @Override
        public void part(long index, long offset, ByteBuffer data) throws IOException {
            write(data);
        }

        @Override
        public void finish() throws IOException {
            publish(false);
        }

        boolean publish(boolean ifAbsent) throws IOException {
            if (stream.hasCapability(StreamCapabilities.HSYNC)) {
                stream.hsync();
            }
            stream.close();
            try {
                names.rename(path, place, ifAbsent ? Options.Rename.NONE : Options.Rename.OVERWRITE);
            } catch (FileAlreadyExistsException there) {
                if (ifAbsent) {
                    return false;
                }
                throw there;
            }
            published = true;
            return true;
        }

        @Override
        public void drop() throws IOException {
            if (!published) {
                stream.close();
                files.delete(path, false);
            }
        }
    }
}
