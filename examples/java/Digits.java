import dev.tessera.*;
import java.io.IOException;
import java.nio.FloatBuffer;
import java.nio.charset.StandardCharsets;
import java.nio.file.*;
import java.util.*;
import java.util.concurrent.locks.LockSupport;

/** Learns to read handwritten digits, data-parallel, fully sharded, tensor-parallel, as a pipeline, or several of these: 64
 * pixels, 128 hidden units with ReLU, 10 classes; AdamW. The Java twin of examples/c/digits.c; see examples/README.md. Run by
 * {@code tessera run -n 4 java -jar target/digits.jar}. */
public final class Digits {
    static final int PIXELS = 64, HIDDEN = 128, CLASSES = 10;
    final Map<String, String> options = new LinkedHashMap<>(Map.of("--data", "examples/data/digits.csv",
            "--checkpoints", "checkpoints", "--steps", "600", "--save-every", "50", "--batch", "32", "--seed", "7",
            "--log", "", "--format", "tessera", "--pace", "0", "--progress", "0"));
    String parallel;
    boolean sharded; // --parallel fsdp or fsdp+tp
    final List<float[]> trainX = new ArrayList<>(), testX = new ArrayList<>();
    final List<Integer> trainY = new ArrayList<>(), testY = new ArrayList<>();
    static final String[] NAMES = {"fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias"}; // of layer l: 2 l and 2 l + 1
    final Tensor[] params = {Tensor.zeros(DType.F32, HIDDEN, PIXELS), Tensor.zeros(DType.F32, HIDDEN),
            Tensor.zeros(DType.F32, CLASSES, HIDDEN), Tensor.zeros(DType.F32, CLASSES)}; // direct: no copies
    final FloatBuffer[] value = new FloatBuffer[4], grad = new FloatBuffer[4];
    int width = HIDDEN; // this rank's hidden units
    TensorParallel tp; // null: not tensor-parallel
    boolean counts = true; // this rank its samples in an evaluation
    Pipelined pipe; // null: no pipeline
    Ddp ddp;
    Fsdp fsdp; // or this one
    Fsdp.Pass pass;

    public static void main(String[] args) {
        final Digits digits = new Digits();
        digits.options.put("--parallel", "ddp");
        digits.readOptions(args);
        digits.parallel = digits.options.get("--parallel");
        digits.sharded = digits.parallel.startsWith("fsdp");
        if (!List.of("ddp", "fsdp", "tp", "dp+tp", "fsdp+tp", "pp", "dp+tp+pp").contains(digits.parallel)) {
            throw usage("--parallel cannot be \"%s\": ddp, fsdp, tp, dp+tp, fsdp+tp, pp or dp+tp+pp", digits.parallel);
        }
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
        initialize(number("--seed"));
        try (Comm comm = Comm.fromEnv();
                Pipelined stages = parallel.endsWith("pp") ? pipelined(comm) : null;
                Mesh mesh = parallel.endsWith("tp") ? meshOf(comm) : null;
                TensorParallel slices = mesh == null ? null : slice(mesh)) {
            train(comm, stages != null ? stages.others : mesh == null ? comm : mesh.comm("dp"));
        }
    }

    Pipelined pipelined(Comm comm) {
        final int multiple = parallel.equals("pp") ? 2 : 4, world = comm.worldSize();
        if (world % multiple != 0) {
            throw usage("--parallel %s needs %s ranks, not %d", parallel, multiple == 2 ? "an even number of" : "a multiple of 4",
                    world);
        }
        return pipe = new Pipelined(comm, params, parallel.contains("tp"));
    }

    /** Of groups that share a model ("tp"); ranks with the same slices have other samples ("dp"). */
    Mesh meshOf(Comm comm) {
        final int world = comm.worldSize(), ranks = parallel.equals("tp") ? world : 2;
        if (world % ranks != 0) throw usage("--parallel %s needs an even number of ranks, not %d", parallel, world);
        return Mesh.over(comm).dim("dp", world / ranks).dim("tp", ranks).build();
    }

    /** From here on, the parameters are this rank's slices of fc1's rows and fc2's columns. */
    TensorParallel slice(Mesh mesh) {
        counts = mesh.coordinate("tp") == 0; // its ranks have the same samples
        tp = TensorParallel.over(mesh, "tp").params(layer(0)).params(layer(1))
                .rule("fc1", TensorParallel.Style.COLUMN).rule("fc2", TensorParallel.Style.ROW).build();
        for (int i = 0; i < 4; ++i) params[i] = tp.slice(NAMES[i]);
        for (int i = 0; i < 4; ++i) value[i] = params[i].floats();
        width = value[1].limit();
        return tp;
    }

    Params layer(int l) { return Params.of(NAMES[2 * l], params[2 * l]).and(NAMES[2 * l + 1], params[2 * l + 1]); }

    void train(Comm comm, Comm others) throws IOException { // those with other samples
        final int steps = number("--steps"), saveEvery = number("--save-every"), seed = number("--seed");
        final int batch = Math.min(number("--batch"), trainX.size());
        final long pace = number("--pace") * 1_000_000L;
        final List<FsdpUnit> units = List.of(FsdpUnit.of("fc1", layer(0)), FsdpUnit.of("fc2", layer(1)));
        final Params all = layer(0).and(NAMES[2], params[2]).and(NAMES[3], params[3]);
        try (Fsdp rows = !sharded ? null // else each rank has its rows of rank 0's values
                        : Fsdp.create(others, units, tp == null ? new FsdpOptions() : new FsdpOptions().tp(tp));
                Ddp copy = sharded || pipe != null ? null : Ddp.create(others, all, tp == null ? new DdpOptions() : new DdpOptions().tp(tp));
                Optimizer opt = (sharded ? Optimizer.adamW(rows) : Optimizer.adamW(pipe != null ? pipe.ddp : copy)).lr(0.003).build();
                Sampler data = Sampler.of(others, trainX.size()).seed(seed).build();
                Saver saver = Saver.at(comm, Path.of(options.get("--checkpoints"))).keepLatest(3)
                        .format(options.get("--format"))
                        .progress(number("--progress") > 0 && comm.rank() == 0 ? Digits::showBar : (p, d, t) -> {}).open()) {
            final boolean first = comm.rank() == 0;
            final State state = (sharded ? State.of("model", rows) : State.of("model", pipe != null ? pipe.ddp : copy))
                    .with("optim", opt).with("data", data);
            if (pipe != null) state.join(comm); // each rank has some of the parameters
            ddp = copy;
            fsdp = rows;
            long step = saver.resume(state); // 0 when there is nothing yet
            print(first, "digits: %d ranks, %s", comm.worldSize(),
                    step == 0 ? "from the beginning" : "resumed after step " + step);
            print(first && step >= steps, "digits: nothing left to do: --steps is %d", steps);
            boolean stop = false;
            while (step < steps && !stop) {
                final long began = System.nanoTime();
                final double loss = forwardBackward(data.batch(batch));
                opt.step();
                if (++step % 10 == 0 || step == steps) {
                    print(first, "step %d/%d loss %.4f", step, steps, loss);
                    log(comm, step, String.format(Locale.ROOT, "\"loss\":%.6f", loss));
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
                final Evaluation evaluation = new Evaluation(others, testY);
                evaluation.compute(comm, pipe != null ? pipe.logits(testX, testY, evaluation.rows) : logits(evaluation.rows));
                log(comm, step, evaluation.facts);
                print(first, "held-out accuracy %.4f", evaluation.accuracy);
            }
            comm.finish();
        }
    }

    /** A pass over a layer begins: sharded parameters are whole until its end, gradients are there in the backward pass. */
    void begin(int layer, boolean backward) {
        if (sharded) pass = backward ? fsdp.backward(layer) : fsdp.forward(layer);
        for (int i = 2 * layer; i < 2 * layer + 2; ++i) {
            if (sharded) value[i] = pass.param(i);
            if (!backward) continue;
            grad[i] = sharded ? pass.grad(i) : ddp.grad(i);
            for (int k = 0; k < grad[i].limit(); ++k) grad[i].put(k, 0);
        }
    }

    /** It ends: gradients are on their way to the other ranks. */
    void end(int layer, boolean backward) {
        if (sharded && backward) pass.ready();
        if (sharded) pass.close();
        for (int i = 2 * layer; !sharded && backward && i < 2 * layer + 2; ++i) ddp.ready(i);
    }

    /** The mean loss over the batch; its gradients are the average of all ranks then. */
    double forwardBackward(long[] samples) {
        final int n = samples.length;
        if (pipe != null) return pipe.step(trainX, trainY, samples);
        final float[][] h = new float[n][width];
        double loss = 0;
        begin(0, false);
        for (int s = 0; s < n; ++s) hiddenLayer(trainX.get((int) samples[s]), h[s]);
        end(0, false);
        begin(1, false);
        final float[][] p = logits(h);
        for (int s = 0; s < n; ++s) {
            final int y = trainY.get((int) samples[s]);
            loss += softmax(p[s], y) / n;
            for (int c = 0; c < CLASSES; ++c) p[s][c] = (p[s][c] - (c == y ? 1 : 0)) / n;
        }
        end(1, false);
        begin(1, true);
        for (int s = 0; s < n; ++s) { // p is the gradient of the logits now
            final float[] dh = new float[width];
            for (int c = 0; c < CLASSES; ++c) {
                final float d = p[s][c];
                grad[3].put(c, grad[3].get(c) + d);
                for (int j = 0; j < width; ++j) {
                    grad[2].put(c * width + j, grad[2].get(c * width + j) + d * h[s][j]);
                    dh[j] += d * value[2].get(c * width + j);
                }
            }
            for (int j = 0; j < width; ++j) h[s][j] = h[s][j] > 0 ? dh[j] : 0; // from here on its gradient
        }
        end(1, true);
        begin(0, true);
        for (int s = 0; s < n; ++s) {
            final float[] x = trainX.get((int) samples[s]);
            for (int j = 0; j < width; ++j) {
                final float d = h[s][j];
                if (d == 0) continue;
                grad[1].put(j, grad[1].get(j) + d);
                for (int i = 0; i < PIXELS; ++i) grad[0].put(j * PIXELS + i, grad[0].get(j * PIXELS + i) + d * x[i]);
            }
        }
        end(0, true);
        if (sharded) fsdp.await();
        else ddp.await();
        return loss;
    }

    void hiddenLayer(float[] x, float[] h) {
        for (int j = 0; j < width; ++j) {
            float sum = value[1].get(j);
            for (int i = 0; i < PIXELS; ++i) sum += value[0].get(j * PIXELS + i) * x[i];
            h[j] = Math.max(sum, 0);
        }
    }

    /** Of slices they are a sum over the ranks, to which the bias is added once. */
    float[][] logits(float[][] h) {
        final Tensor all = Tensor.zeros(DType.F32, h.length, CLASSES);
        final FloatBuffer out = all.floats();
        for (int i = 0; i < out.limit(); ++i) {
            float sum = tp == null ? value[3].get(i % CLASSES) : 0;
            for (int j = 0; j < width; ++j) sum += value[2].get(i % CLASSES * width + j) * h[i / CLASSES][j];
            out.put(i, sum);
        }
        if (tp != null) tp.leave(all, all, sharded ? pass.paramTensor(3) : params[3]);
        final float[][] logits = new float[h.length][CLASSES];
        for (float[] row : logits) out.get(row);
        return logits;
    }

    static int likeliest(float[] logits) {
        int best = 0;
        for (int c = 1; c < CLASSES; ++c) best = logits[c] > logits[best] ? c : best;
        return best;
    }

    /** Makes probabilities of logits; the loss of the sample. */
    static double softmax(float[] logits, int label) {
        final float max = logits[likeliest(logits)];
        float sum = 0;
        for (float logit : logits) sum += (float) Math.exp(logit - max);
        final double loss = Math.log(sum) + max - logits[label];
        for (int c = 0; c < CLASSES; ++c) logits[c] = (float) Math.exp(logits[c] - max) / sum;
        return loss;
    }

    /** Of held-out rows; null if another rank counts them. */
    float[][] logits(long[] rows) {
        final float[][] h = new float[rows.length][width];
        begin(0, false);
        for (int i = 0; i < h.length; ++i) hiddenLayer(testX.get((int) rows[i]), h[i]);
        end(0, false);
        begin(1, false);
        final float[][] logits = logits(h);
        end(1, false);
        return counts ? logits : null;
    }

    /** The same values in every language: SplitMix64, scaled by the number of inputs. */
    void initialize(long seed) {
        for (int p = 0; p < 4; ++p) {
            final FloatBuffer param = value[p] = params[p].floats();
            final double scale = Math.sqrt(p < 2 ? PIXELS : HIDDEN);
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

    void log(Comm comm, long step, String facts) throws IOException {
        if (options.get("--log").isEmpty()) return;
        final String line = String.format(Locale.ROOT,
                "{\"time\":%.3f,\"rank\":%d,\"world\":%d,\"step\":%d,%s,\"lang\":\"java\"}\n",
                System.currentTimeMillis() / 1000.0, comm.rank(), comm.worldSize(), step, facts);
        Files.write(Path.of(options.get("--log")), line.getBytes(StandardCharsets.UTF_8),
                StandardOpenOption.CREATE, StandardOpenOption.APPEND);
    }

    static void print(boolean first, String format, Object... values) {
        if (first) System.out.println(String.format(Locale.ROOT, format, values));
    }
}
