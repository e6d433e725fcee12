import dev.tessera.*;
import java.io.IOException;
import java.nio.FloatBuffer;
import java.nio.charset.StandardCharsets;
import java.nio.file.*;
import java.util.*;
import java.util.concurrent.locks.LockSupport;
import java.util.stream.IntStream;

/** Learns to read handwritten digits, data-parallel: 64 pixels, 128 hidden units with ReLU, 10 classes; AdamW. The Java
 * twin of examples/c/digits.c; see examples/README.md. Run by {@code tessera run -n 4 java -jar target/digits.jar}. */
public final class Digits {
    static final int PIXELS = 64, HIDDEN = 128, CLASSES = 10;
    final Map<String, String> options = new LinkedHashMap<>(Map.of("--data", "examples/data/digits.csv",
            "--checkpoints", "checkpoints", "--steps", "600", "--save-every", "50", "--batch", "32", "--seed", "7",
            "--log", "", "--format", "tessera", "--pace", "0", "--progress", "0"));
    final List<float[]> trainX = new ArrayList<>(), testX = new ArrayList<>();
    final List<Integer> trainY = new ArrayList<>(), testY = new ArrayList<>();
    final FloatBuffer w1 = floats(HIDDEN * PIXELS), b1 = floats(HIDDEN), w2 = floats(CLASSES * HIDDEN), b2 = floats(CLASSES);

    public static void main(String[] args) {
        final Digits digits = new Digits();
        digits.readOptions(args);
        digits.readData();
        try {
            digits.train();
        } catch (TesseraException | IOException error) {
            System.err.println("digits: " + error.getMessage());
            Launch.recordError(error);
            System.exit(1);
        }
    }

    void train() throws IOException {
        final int steps = number("--steps"), saveEvery = number("--save-every"), seed = number("--seed");
        final int batch = Math.min(number("--batch"), trainX.size());
        final long pace = number("--pace") * 1_000_000L;
        initialize(seed);
        try (Comm comm = Comm.fromEnv();
                Ddp ddp = Ddp.create(comm, Params.of("fc1.weight", w1, HIDDEN, PIXELS).and("fc1.bias", b1)
                        .and("fc2.weight", w2, CLASSES, HIDDEN).and("fc2.bias", b2)); // rank 0's values on every rank
                Optimizer opt = Optimizer.adamW(ddp).lr(0.003).build();
                Sampler data = Sampler.of(comm, trainX.size()).seed(seed).build();
                Saver saver = Saver.at(comm, Path.of(options.get("--checkpoints"))).keepLatest(3)
                        .format(options.get("--format"))
                        .progress(number("--progress") > 0 && comm.rank() == 0 ? Digits::showBar : (p, d, t) -> {}).open()) {
            final boolean first = comm.rank() == 0;
            final State state = State.of("model", ddp).with("optim", opt).with("data", data);
            long step = saver.resume(state); // 0 when there is nothing yet
            print(first, "digits: %d ranks, %s", comm.worldSize(),
                    step == 0 ? "from the beginning" : "resumed after step " + step);
            print(first && step >= steps, "digits: nothing left to do: --steps is %d", steps);
            boolean stop = false;
            while (step < steps && !stop) {
                final long began = System.nanoTime();
                ddp.zeroGrad();
                final double loss = forwardBackward(data.batch(batch), ddp);
                ddp.await(); // every gradient is the average of all ranks now
                opt.step();
                if (++step % 10 == 0 || step == steps) {
                    print(first, "step %d/%d loss %.4f", step, steps, loss);
                    log(comm, step, "loss", loss);
                }
                stop = saver.shouldStop(step); // the same answer on all ranks
                if (stop || (saveEvery > 0 && step % saveEvery == 0)) {
                    saver.saveAsync(step, state.metric("loss", loss));
                }
                for (long left; (left = began + pace - System.nanoTime()) > 0;) LockSupport.parkNanos(left);
            }
            saver.await();
            if (stop) {
                print(first, "digits: stopped after step %d", step);
            } else {
                log(comm, step, "accuracy", accuracy());
                print(first, "held-out accuracy %.4f", accuracy());
            }
            comm.finish();
        }
    }

    /** The mean loss over the batch; adds its gradients to those of {@code ddp}. */
    double forwardBackward(long[] samples, Ddp ddp) {
        final FloatBuffer gw1 = ddp.grad(0), gb1 = ddp.grad(1), gw2 = ddp.grad(2), gb2 = ddp.grad(3);
        final float[] h = new float[HIDDEN], logits = new float[CLASSES], dh = new float[HIDDEN];
        double loss = 0;
        for (long sample : samples) {
            final float[] x = trainX.get((int) sample);
            final int y = trainY.get((int) sample);
            final float max = logits[forward(x, h, logits)];
            float sum = 0;
            for (float logit : logits) sum += (float) Math.exp(logit - max);
            loss += (Math.log(sum) + max - logits[y]) / samples.length;
            Arrays.fill(dh, 0);
            for (int c = 0; c < CLASSES; ++c) {
                final float d = ((float) Math.exp(logits[c] - max) / sum - (c == y ? 1 : 0)) / samples.length;
                gb2.put(c, gb2.get(c) + d);
                for (int j = 0; j < HIDDEN; ++j) {
                    gw2.put(c * HIDDEN + j, gw2.get(c * HIDDEN + j) + d * h[j]);
                    dh[j] += d * w2.get(c * HIDDEN + j);
                }
            }
            for (int j = 0; j < HIDDEN; ++j) {
                if (h[j] <= 0) continue;
                gb1.put(j, gb1.get(j) + dh[j]);
                for (int i = 0; i < PIXELS; ++i) gw1.put(j * PIXELS + i, gw1.get(j * PIXELS + i) + dh[j] * x[i]);
            }
        }
        for (int i = 3; i >= 0; --i) ddp.ready(i); // with a larger model: as soon as each is there
        return loss;
    }

    /** Fills h and logits; returns the likeliest digit. */
    int forward(float[] x, float[] h, float[] logits) {
        for (int j = 0; j < HIDDEN; ++j) {
            float sum = b1.get(j);
            for (int i = 0; i < PIXELS; ++i) sum += w1.get(j * PIXELS + i) * x[i];
            h[j] = Math.max(sum, 0);
        }
        int best = 0;
        for (int c = 0; c < CLASSES; ++c) {
            logits[c] = b2.get(c);
            for (int j = 0; j < HIDDEN; ++j) logits[c] += w2.get(c * HIDDEN + j) * h[j];
            if (logits[c] > logits[best]) best = c;
        }
        return best;
    }

    double accuracy() {
        final float[] h = new float[HIDDEN], logits = new float[CLASSES];
        return IntStream.range(0, testX.size()).filter(i -> forward(testX.get(i), h, logits) == testY.get(i)).count()
                / (double) testX.size();
    }

    /** The same values in every language: SplitMix64, scaled by the number of inputs. */
    void initialize(long seed) {
        for (FloatBuffer param : List.of(w1, b1, w2, b2)) {
            final double scale = Math.sqrt(param == w1 || param == b1 ? PIXELS : HIDDEN);
            for (int i = 0; i < param.limit(); ++i) {
                seed += 0x9e3779b97f4a7c15L;
                long z = (seed ^ seed >>> 30) * 0xbf58476d1ce4e5b9L;
                z = (z ^ z >>> 27) * 0x94d049bb133111ebL;
                param.put(i, (float) ((2 * (((z ^ z >>> 31) >>> 40) / 16777216.0) - 1) / scale));
            }
        }
    }

    void readData() {
        final String path = options.get("--data");
        int row = 0;
        try {
            final List<String> lines = Files.readAllLines(Path.of(path));
            for (; row < 1797; ++row) {
                final String[] cells = lines.get(row).split(",");
                final float[] x = new float[PIXELS];
                for (int i = 0; i < PIXELS; ++i) x[i] = Float.parseFloat(cells[i]) / 16;
                final boolean heldOut = row < 1782 && row % 6 == 5;
                (heldOut ? testX : trainX).add(x);
                (heldOut ? testY : trainY).add(Objects.checkIndex(Integer.parseInt(cells[PIXELS].trim()), CLASSES));
            }
        } catch (IOException error) {
            throw usage("cannot read %s (%s): start in the clone's root or name the file by --data", path, error);
        } catch (NumberFormatException | IndexOutOfBoundsException error) {
            throw usage("%s is not the digits: row %d is not 64 pixels and a label", path, row + 1);
        }
    }

    /** A bar on standard error: how far a save or a load is. Saves in the background call it on another thread. */
    static void showBar(Progress.Phase phase, long done, long total) {
        if (total == 0 || (phase != Progress.Phase.WRITE && phase != Progress.Phase.READ)) return;
        System.err.printf("\r%s [%-20s]%s", phase == Progress.Phase.READ ? "loading" : "saving",
                "#".repeat((int) (20 * done / total)), done == total ? "\n" : "");
    }

    void readOptions(String[] args) {
        for (int i = 0; i < args.length; i += 2) {
            if (!options.containsKey(args[i])) throw usage("there is no option %s", args[i]);
            if (i + 1 == args.length) throw usage("%s needs a value", args[i]);
            options.put(args[i], args[i + 1]);
        }
        for (String name : List.of("--steps", "--save-every", "--batch", "--seed", "--pace", "--progress")) {
            final int least = name.equals("--steps") || name.equals("--batch") ? 1 : 0;
            if (options.get(name).matches("[0-9]{1,9}") && number(name) >= least) continue;
            throw usage("%s cannot be \"%s\": a number from %d to 999999999", name, options.get(name), least);
        }
    }

    int number(String name) { return Integer.parseInt(options.get(name)); }

    static RuntimeException usage(String format, Object... values) {
        System.err.println("digits: " + String.format(Locale.ROOT, format, values) + "; see examples/README.md");
        System.exit(2);
        return new IllegalStateException();
    }

    void log(Comm comm, long step, String what, double value) throws IOException {
        if (options.get("--log").isEmpty()) return;
        final String line = String.format(Locale.ROOT,
                "{\"time\":%.3f,\"rank\":%d,\"world\":%d,\"step\":%d,\"%s\":%.6f,\"lang\":\"java\"}\n",
                System.currentTimeMillis() / 1000.0, comm.rank(), comm.worldSize(), step, what, value);
        Files.write(Path.of(options.get("--log")), line.getBytes(StandardCharsets.UTF_8),
                StandardOpenOption.CREATE, StandardOpenOption.APPEND);
    }

    static FloatBuffer floats(int count) { return Tensor.zeros(DType.F32, count).floats(); } // direct: no copies

    static void print(boolean first, String format, Object... values) {
        if (first) System.out.println(String.format(Locale.ROOT, format, values));
    }
}
