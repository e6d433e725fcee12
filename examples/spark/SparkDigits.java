import dev.tessera.*;
import java.io.Serializable;
import java.nio.FloatBuffer;
import java.nio.file.Path;
import java.util.ArrayList;
import java.util.List;
import java.util.Locale;
import org.apache.spark.BarrierTaskContext;
import org.apache.spark.sql.Row;
import org.apache.spark.sql.SparkSession;
import scala.Function1;
import scala.collection.Iterator;
import scala.jdk.javaapi.CollectionConverters;
import scala.reflect.ClassTag$;

/** Digits under Spark: a DataFrame has the rows, the tasks of a barrier stage are the ranks, Tessera averages and saves. A linear
 * classifier, so that the program is about the job. Arguments: ranks, epochs, the CSV file, the root of the checkpoints, which
 * all executors share. Run again with more epochs, or other ranks, it resumes. */
public final class SparkDigits {
    static final int PIXELS = 64, CLASSES = 10, BATCH = 25;

    interface Task extends Function1<Iterator<Row>, Iterator<String>>, Serializable {}

    public static void main(String[] arguments) throws java.io.IOException {
        final int ranks = Integer.parseInt(arguments[0]), epochs = Integer.parseInt(arguments[1]);
        final String data = arguments[2], root = arguments[3];
        try (SparkSession spark = SparkSession.builder().appName("digits").getOrCreate()) {
            final Task task = rows -> CollectionConverters.asScala(List.of(train(rows, epochs, root)).iterator());
            final var stage = spark.read().option("inferSchema", true).csv(data).repartition(ranks).rdd().barrier();
            final Object results = stage.mapPartitions(task, false, ClassTag$.MODULE$.<String>apply(String.class)).collect();
            for (Object line : (Object[]) results) System.out.println(line);
        }
    }

    /** What each rank does with its partition of the rows. */
    static String train(Iterator<Row> rows, int epochs, String root) {
        final List<float[]> samples = new ArrayList<>();
        while (rows.hasNext()) samples.add(sample(rows.next()));
        final BarrierTaskContext task = BarrierTaskContext.get();
        final Tensor weight = Tensor.zeros(DType.F32, CLASSES, PIXELS), bias = Tensor.zeros(DType.F32, CLASSES);
        try (Comm comm = Comm.fromSpark(task.partitionId(), task.getTaskInfos()[0].address(), task::allGather);
                Ddp ddp = Ddp.create(comm, Params.of("weight", weight).and("bias", bias));
                Optimizer optimizer = Optimizer.adamW(ddp).lr(0.01).build();
                State state = State.of("model", ddp).with("optim", optimizer);
                Saver saver = Saver.at(comm, Path.of(root)).keepLatest(2).open()) {
            final long steps = fewest(comm, samples.size()) / BATCH; // partitions may differ by a row
            final long begun = saver.resume(state); // the step of a save is the number of epochs done
            for (long epoch = begun; epoch < epochs; ++epoch) {
                for (int step = 0; step < steps; ++step) {
                    gradients(ddp, samples.subList(step * BATCH, (step + 1) * BATCH));
                    ddp.readyAll();
                    ddp.await();
                    optimizer.step();
                }
                saver.saveAsync(epoch + 1, state);
            }
            saver.await();
            int right = 0;
            for (float[] one : samples) right += likeliest(logits(ddp, one)) == (int) one[PIXELS] ? 1 : 0;
            final Tensor counts = Tensor.copyOf(new long[] {right, samples.size()});
            comm.allReduce(counts, ReduceOp.SUM);
            comm.finish();
            return String.format(Locale.ROOT, "rank %d of %d over %s: epochs %d to %d, accuracy %.4f", comm.rank(), comm.worldSize(),
                    comm.transport(), begun, epochs, counts.longs().get(0) / (double) counts.longs().get(1));
        }
    }

    static long fewest(Comm comm, long mine) {
        final Tensor count = Tensor.copyOf(new long[] {mine});
        comm.allReduce(count, ReduceOp.MIN);
        return count.longs().get(0);
    }

    /** 64 pixels from 0 to 1 and the label. */
    static float[] sample(Row row) {
        final float[] sample = new float[PIXELS + 1];
        for (int i = 0; i < PIXELS; ++i) sample[i] = row.getInt(i) / 16f;
        sample[PIXELS] = row.getInt(PIXELS);
        return sample;
    }

    static double[] logits(Ddp ddp, float[] sample) {
        final FloatBuffer weight = ddp.param(0), bias = ddp.param(1);
        final double[] logits = new double[CLASSES];
        for (int c = 0; c < CLASSES; ++c) {
            logits[c] = bias.get(c);
            for (int i = 0; i < PIXELS; ++i) logits[c] += weight.get(c * PIXELS + i) * sample[i];
        }
        return logits;
    }

    static int likeliest(double[] logits) {
        int best = 0;
        for (int c = 1; c < CLASSES; ++c) best = logits[c] > logits[best] ? c : best;
        return best;
    }

    /** Of the mean cross-entropy over the batch. */
    static void gradients(Ddp ddp, List<float[]> batch) {
        ddp.zeroGrad();
        final FloatBuffer weight = ddp.grad(0), bias = ddp.grad(1);
        for (float[] sample : batch) {
            final double[] p = logits(ddp, sample);
            final double most = p[likeliest(p)];
            double sum = 0;
            for (int c = 0; c < CLASSES; ++c) sum += p[c] = Math.exp(p[c] - most);
            for (int c = 0; c < CLASSES; ++c) {
                final float d = (float) ((p[c] / sum - (c == (int) sample[PIXELS] ? 1 : 0)) / batch.size());
                bias.put(c, bias.get(c) + d);
                for (int i = 0; i < PIXELS; ++i) weight.put(c * PIXELS + i, weight.get(c * PIXELS + i) + d * sample[i]);
            }
        }
    }
}
