import dev.tessera.*;
import java.nio.FloatBuffer;
import java.nio.LongBuffer;
import java.util.List;

/** The digits network as a pipeline: four stages with one parameter each, on four ranks or on two. A rank of two has the
 * weights or the biases. Further ranks are replicas of the pipeline with other samples, or share each stage's parameter. */
final class Pipelined implements AutoCloseable {
    private static final int STAGES = 4, MICROBATCHES = 4;
    private final FloatBuffer[] value = new FloatBuffer[STAGES], grad = new FloatBuffer[STAGES]; // of this rank's stages
    private final int[] indexOf = new int[STAGES];
    private final Mesh mesh, same;
    private final TensorParallel tp; // null: each stage is on one rank
    private final Pipeline pipe;
    private float[][] evaluated; // logits, on the ranks of the last stage
    private int next; // sample of an evaluation
    final Comm others; // the ranks with other samples
    final Ddp ddp;

    Pipelined(Comm comm, Tensor[] params, boolean cut) {
        final int world = comm.worldSize(), tpRanks = cut ? 2 : 1, ranks = !cut && world % STAGES == 0 ? STAGES : 2;
        mesh = Mesh.over(comm).dim("pp", ranks).dim("same", world / ranks).build();
        same = Mesh.over(mesh.comm("same")).dim("dp", world / ranks / tpRanks).dim("tp", tpRanks).build();
        others = same.comm("dp");
        final Comm line = mesh.comm("pp");

        final Tensor[] own = params.clone();
        tp = !cut ? null : TensorParallel.over(same, "tp").params(stagesOf(line, own, ranks))
                .rule("fc1", TensorParallel.Style.COLUMN).rule("fc2", TensorParallel.Style.ROW).build();
        for (int stage = line.rank(); cut && stage < STAGES; stage += ranks) own[stage] = tp.slice(Digits.NAMES[stage]);
        ddp = Ddp.create(others, stagesOf(line, own, ranks), cut ? new DdpOptions().tp(tp) : new DdpOptions());

        final Pipeline.Builder stages = Pipeline.on(line).microbatches(MICROBATCHES)
                .schedule(ranks == STAGES ? Pipeline.Schedule.ONE_F_ONE_B : Pipeline.Schedule.INTERLEAVED_1F1B);
        for (int stage = line.rank(); stage < STAGES; stage += ranks) {
            indexOf[stage] = stage / ranks;
            value[stage] = own[stage].floats();
            grad[stage] = ddp.grad(indexOf[stage]);
            stages.stage(stage, this::forward, this::backward);
        }
        pipe = stages.build();
    }

    private static Params stagesOf(Comm line, Tensor[] params, int ranks) {
        Params own = Params.of(Digits.NAMES[line.rank()], params[line.rank()]);
        for (int stage = line.rank() + ranks; stage < STAGES; stage += ranks) own = own.and(Digits.NAMES[stage], params[stage]);
        return own;
    }

    private void forward(StageCall call) {
        final Tensor input = call.inputs().get(0);
        final FloatBuffer x = input.floats(), param = value[call.stage()];
        final int rows = (int) input.shape()[0], in = (int) input.shape()[1];
        final int out = call.stage() == 0 ? param.limit() / in : call.stage() == 1 ? in : Digits.CLASSES;
        final Tensor output = call.output(DType.F32, rows, out);
        final FloatBuffer y = output.floats();
        for (int i = 0; i < rows * out; ++i) {
            float sum = 0;
            if (call.stage() % 2 == 1) {
                sum = x.get(i) + param.get(i % out);
            } else {
                for (int k = 0; k < in; ++k) sum += param.get(i % out * in + k) * x.get(i / out * in + k);
            }
            y.put(i, call.stage() == 1 ? Math.max(sum, 0) : sum);
        }
        if (call.stage() == 2 && tp != null) tp.leave(output, output); // of slices: the sum of all ranks' parts
        if (call.stage() == 3 && call.isTraining()) loss(call, y, rows);
        if (call.stage() == 3 && !call.isTraining()) keep(y, rows);
    }

    private void keep(FloatBuffer y, int rows) {
        for (int r = 0; r < rows; ++r) y.get(evaluated[next++]);
    }

    /** From here on, y is the gradient of the logits, for the backward. */
    private static void loss(StageCall call, FloatBuffer y, int rows) {
        final int classes = Digits.CLASSES;
        final float[] logits = new float[classes];
        final LongBuffer labels = call.targets().get(0).longs();
        double loss = 0;
        for (int r = 0; r < rows; ++r) {
            final int label = (int) labels.get(r);
            for (int c = 0; c < classes; ++c) logits[c] = y.get(r * classes + c);
            loss += Digits.softmax(logits, label);
            for (int c = 0; c < classes; ++c) {
                y.put(r * classes + c, (logits[c] - (c == label ? 1 : 0)) * (float) call.weight() / rows);
            }
        }
        call.loss(loss / rows);
    }

    private void backward(StageCall call) {
        final int stage = call.stage();
        final Tensor input = call.inputs().get(0), output = stage == 3 ? call.outputs().get(0) : call.outputGrads().get(0);
        final int rows = (int) input.shape()[0], in = (int) input.shape()[1], out = (int) output.shape()[1];
        final FloatBuffer x = input.floats(), dy = output.floats(), sum = grad[stage], param = value[stage];
        final FloatBuffer y = call.outputs().get(0).floats();
        final FloatBuffer dx = stage == 0 ? null : call.inputGrads().get(0).floats(); // zeros
        for (int i = 0; i < rows * out; ++i) {
            final int r = i / out, j = i % out;
            final float d = stage == 1 && y.get(i) <= 0 ? 0 : dy.get(i);
            if (stage % 2 == 1) {
                sum.put(j, sum.get(j) + d);
                dx.put(i, d);
                continue;
            }
            for (int k = 0; k < in; ++k) {
                sum.put(j * in + k, sum.get(j * in + k) + d * x.get(r * in + k));
                if (dx != null) dx.put(r * in + k, dx.get(r * in + k) + d * param.get(j * in + k));
            }
        }
        if (call.isLastBackward()) ddp.ready(indexOf[stage]); // averaged while other stages still compute
    }

    /** The mean loss; the gradients are the average of all replicas then. */
    double step(List<float[]> x, List<Integer> labels, long[] samples) {
        for (FloatBuffer one : grad) {
            for (int k = 0; one != null && k < one.limit(); ++k) one.put(k, 0);
        }
        final double[] losses = pipe.step(pixels(x, samples), labels(labels, samples));
        ddp.await();
        return mean(losses, samples.length);
    }

    /** On the first of the ranks of the last stage; null on others. */
    float[][] logits(List<float[]> x, List<Integer> labels, long[] samples) {
        evaluated = new float[samples.length][Digits.CLASSES];
        next = 0;
        pipe.eval(pixels(x, samples), labels(labels, samples));
        return next == samples.length && same.coordinate("tp") == 0 ? evaluated : null;
    }

    private static Tensor pixels(List<float[]> of, long[] samples) {
        final Tensor all = Tensor.zeros(DType.F32, samples.length, Digits.PIXELS);
        final FloatBuffer values = all.floats();
        for (long sample : samples) values.put(of.get((int) sample));
        return all;
    }

    private static Tensor labels(List<Integer> of, long[] samples) {
        final Tensor all = Tensor.zeros(DType.I64, samples.length);
        final LongBuffer values = all.longs();
        for (long sample : samples) values.put(of.get((int) sample));
        return all;
    }

    /** Of values that are means over a micro-batch each. */
    private static double mean(double[] values, long rows) {
        double sum = 0;
        for (int i = 0; i < values.length; ++i) {
            sum += values[i] * (rows / values.length + (i < rows % values.length ? 1 : 0)) / rows;
        }
        return sum;
    }

    @Override
    public void close() {
        pipe.close();
        ddp.close();
        if (tp != null) tp.close();
        same.close();
        mesh.close();
    }
}
