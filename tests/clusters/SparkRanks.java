// A barrier stage whose tasks are ranks, in Java: Spark's executors run several tasks in one process, so ranks are threads.
// Argument: master.

import dev.tessera.Comm;
import dev.tessera.ReduceOp;
import dev.tessera.Tensor;
import java.io.Serializable;
import java.net.InetAddress;
import java.nio.FloatBuffer;
import java.util.Arrays;
import java.util.List;
import org.apache.spark.BarrierTaskContext;
import org.apache.spark.SparkConf;
import org.apache.spark.api.java.JavaSparkContext;
import scala.Function1;
import scala.collection.Iterator;
import scala.jdk.javaapi.CollectionConverters;
import scala.reflect.ClassTag$;

public final class SparkRanks {
    static final int RANKS = 4;

    interface Task extends Function1<Iterator<Integer>, Iterator<String>>, Serializable {}

    public static void main(String[] arguments) {
        SparkConf configuration = new SparkConf().setMaster(arguments[0]).setAppName("ranks");
        try (JavaSparkContext context = new JavaSparkContext(configuration)) {
            Task task = ignored -> CollectionConverters.asScala(List.of(sum()).iterator());
            var stage = context.parallelize(Arrays.asList(0, 1, 2, 3), RANKS).rdd().barrier();
            Object[] lines = (Object[]) stage.mapPartitions(task, false, ClassTag$.MODULE$.<String>apply(String.class)).collect();
            for (Object line : lines) System.out.println(line);
        }
    }

    static String sum() {
        BarrierTaskContext task = BarrierTaskContext.get();
        try (Comm comm = Comm.fromSpark(task.partitionId(), task.getTaskInfos()[0].address(), task::allGather)) {
            float[] mine = new float[100_003];
            Arrays.fill(mine, comm.rank() + 1);
            Tensor sums = Tensor.copyOf(mine);
            comm.allReduce(sums, ReduceOp.SUM);
            comm.finish();
            FloatBuffer found = sums.floats();
            return "rank " + comm.rank() + " on " + hostName() + ": " + found.get(0) + " " + found.get(100_002);
        }
    }

    static String hostName() {
        try {
            return InetAddress.getLocalHost().getHostName();
        } catch (java.net.UnknownHostException error) {
            throw new IllegalStateException(error);
        }
    }
}
