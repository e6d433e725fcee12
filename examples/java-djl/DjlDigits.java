import ai.djl.Model;
import ai.djl.ndarray.NDArray;
import ai.djl.ndarray.NDList;
import ai.djl.ndarray.NDManager;
import ai.djl.ndarray.types.Shape;
import ai.djl.nn.Activation;
import ai.djl.nn.SequentialBlock;
import ai.djl.nn.core.Linear;
import ai.djl.training.DefaultTrainingConfig;
import ai.djl.training.GradientCollector;
import ai.djl.training.Trainer;
import ai.djl.training.loss.Loss;
import ai.djl.training.tracker.Tracker;
import dev.tessera.*;
import java.io.IOException;
import java.nio.ByteOrder;
import java.nio.FloatBuffer;
import java.nio.file.Path;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.List;
import java.util.Locale;
import java.util.concurrent.locks.LockSupport;

/** The digits trainer with a network and the autograd of DJL (its PyTorch engine), beside ../java/Digits.java, whose
 * command line, data and initial values it takes. Tessera averages the gradients; the optimizer is Tessera's AdamW or, with
 * {@code --optimizer djl}, DJL's SGD. Either updates the network's own memory, with which it is registered. */
public final class DjlDigits {
    static final String[] NAMES = {"fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias"};
    final Digits digits = new Digits();
    Trainer trainer;
    final List<NDArray> weights = new ArrayList<>(); // the network's, in the order of NAMES

    public static void main(String[] args) {
        System.setProperty("ai.djl.offline", "true"); // PyTorch's libraries are on the class path
        final DjlDigits djl = new DjlDigits();
        djl.digits.options.put("--optimizer", "tessera");
        djl.digits.readOptions(args);
        if (!List.of("tessera", "djl").contains(djl.digits.options.get("--optimizer"))) {
            throw Digits.usage("--optimizer cannot be \"%s\": tessera or djl", djl.digits.options.get("--optimizer"));
        }
        djl.digits.readData();
        try (Model model = Model.newInstance("digits", "PyTorch")) {
            djl.train(model);
        } catch (TesseraException | IOException error) {
            System.err.println("digits: " + error.getMessage());
            Launch.recordError(error);
            System.exit(1);
        }
    }

    void train(Model model) throws IOException {
        final int steps = digits.number("--steps"), saveEvery = digits.number("--save-every"), seed = digits.number("--seed");
        final int batch = Math.min(digits.number("--batch"), digits.trainX.size());
        final long pace = digits.number("--pace") * 1_000_000L;
        model.setBlock(new SequentialBlock().add(Linear.builder().setUnits(Digits.HIDDEN).build()).add(Activation::relu)
                .add(Linear.builder().setUnits(Digits.CLASSES).build()));
        trainer = model.newTrainer(new DefaultTrainingConfig(Loss.softmaxCrossEntropyLoss())
                .optOptimizer(ai.djl.training.optimizer.Optimizer.sgd().setLearningRateTracker(Tracker.fixed(0.1f)).build()));
        trainer.initialize(new Shape(batch, Digits.PIXELS));
        digits.initialize(seed);
        final Params params = register(List.of(digits.value));
        try (Trainer closed = trainer; // last: what follows uses its memory
                Comm comm = Comm.fromEnv();
                Ddp ddp = Ddp.create(comm, params); // rank 0's values on every rank
                Optimizer ours = digits.options.get("--optimizer").equals("tessera")
                        ? Optimizer.adamW(ddp).lr(0.003).build() : null;
                Sampler data = Sampler.of(comm, digits.trainX.size()).seed(seed).build();
                Saver saver = Saver.at(comm, Path.of(digits.options.get("--checkpoints"))).keepLatest(3)
                        .format(digits.options.get("--format")).open()) {
            final boolean first = comm.rank() == 0;
            final State state = State.of("model", ddp).with("data", data);
            if (ours != null) state.with("optim", ours); // DJL's SGD has no state of its own
            long step = saver.resume(state); // 0 when there is nothing yet
            Digits.print(first, "digits: %d ranks, %s", comm.worldSize(),
                    step == 0 ? "from the beginning" : "resumed after step " + step);
            Digits.print(first && step >= steps, "digits: nothing left to do: --steps is %d", steps);
            boolean stop = false;
            while (step < steps && !stop) {
                final long began = System.nanoTime();
                final double loss = forwardBackward(data.batch(batch));
                average(ddp, ours == null);
                if (ours != null) ours.step();
                else trainer.step();
                if (++step % 10 == 0 || step == steps) {
                    Digits.print(first, "step %d/%d loss %.4f", step, steps, loss);
                    digits.log(comm, step, String.format(Locale.ROOT, "\"loss\":%.6f", loss));
                }
                stop = saver.shouldStop(step); // the same answer on all ranks
                if (stop || (saveEvery > 0 && step % saveEvery == 0)) saver.saveAsync(step, state.metric("loss", loss));
                for (long left; (left = began + pace - System.nanoTime()) > 0;) LockSupport.parkNanos(left);
            }
            saver.await();
            if (stop) {
                Digits.print(first, "digits: stopped after step %d", step);
            } else {
                final Evaluation evaluation = evaluate(comm);
                digits.log(comm, step, evaluation.facts);
                Digits.print(first, "held-out accuracy %.4f", evaluation.accuracy);
            }
            comm.finish();
        }
    }

    /** Gives the network its initial values, and Tessera the network's memory. */
    Params register(List<FloatBuffer> initial) {
        Params params = null;
        for (var parameter : trainer.getModel().getBlock().getParameters().values()) {
            final NDArray weight = parameter.getArray();
            final int i = weights.size();
            floats(weight).put(initial.get(i).duplicate());
            params = params == null ? Params.of(NAMES[i], floats(weight), weight.getShape().getShape())
                    : params.and(NAMES[i], floats(weight), weight.getShape().getShape());
            weights.add(weight);
        }
        return params;
    }

    /** The mean loss over the batch; its gradients are the network's. */
    double forwardBackward(long[] samples) {
        final float[][] pixels = new float[samples.length][];
        final long[] labels = new long[samples.length];
        for (int i = 0; i < samples.length; ++i) {
            pixels[i] = digits.trainX.get((int) samples[i]);
            labels[i] = digits.trainY.get((int) samples[i]);
        }
        try (NDManager scope = trainer.getManager().newSubManager();
                GradientCollector collector = trainer.newGradientCollector()) {
            collector.zeroGradients(); // the former step's; backward adds
            final NDArray loss = trainer.getLoss().evaluate(new NDList(scope.create(labels)),
                    trainer.forward(new NDList(scope.create(pixels))));
            collector.backward(loss);
            return loss.getFloat();
        }
    }

    /** The gradients become the average over the ranks: in the model's views and, if wanted, in the network. */
    void average(Ddp ddp, boolean back) {
        for (int i = weights.size(); --i >= 0;) {
            try (NDArray gradient = weights.get(i).getGradient()) {
                ddp.grad(i).duplicate().put(floats(gradient));
            }
            ddp.ready(i);
        }
        ddp.await();
        for (int i = 0; back && i < weights.size(); ++i) {
            try (NDArray gradient = weights.get(i).getGradient()) {
                floats(gradient).put(ddp.grad(i).duplicate());
            }
        }
    }

    Evaluation evaluate(Comm comm) {
        final Evaluation evaluation = new Evaluation(comm, digits.testY);
        final float[][] pixels = new float[evaluation.rows.length][], logits = new float[pixels.length][];
        for (int i = 0; i < pixels.length; ++i) pixels[i] = digits.testX.get((int) evaluation.rows[i]);
        try (NDManager scope = trainer.getManager().newSubManager()) {
            final float[] all = trainer.evaluate(new NDList(scope.create(pixels))).singletonOrThrow().toFloatArray();
            for (int i = 0; i < logits.length; ++i) {
                logits[i] = Arrays.copyOfRange(all, Digits.CLASSES * i, Digits.CLASSES * (i + 1));
            }
        }
        evaluation.compute(comm, logits);
        return evaluation;
    }

    /** The elements where they lie. */
    static FloatBuffer floats(NDArray array) {
        return array.toByteBuffer(true).order(ByteOrder.nativeOrder()).asFloatBuffer();
    }
}
