// A barrier stage whose tasks are ranks, in Java: Spark's executors run several tasks in one process, so ranks are threads.
// Arguments: master, token of the job.

import dev.tessera.Comm;
import dev.tessera.ReduceOp;
import dev.tessera.Store;
import dev.tessera.StoreOptions;
import dev.tessera.StoreServer;
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
        String token = arguments[1];
        SparkConf configuration = new SparkConf().setMaster(arguments[0]).setAppName("ranks");
        try (JavaSparkContext context = new JavaSparkContext(configuration)) {
            Task task = ignored -> CollectionConverters.asScala(List.of(sum(token)).iterator());
            var stage = context.parallelize(Arrays.asList(0, 1, 2, 3), RANKS).rdd().barrier();
            Object[] lines = (Object[]) stage.mapPartitions(task, false, ClassTag$.MODULE$.<String>apply(String.class)).collect();
            for (Object line : lines) System.out.println(line);
        }
    }

    static String sum(String token) {
        BarrierTaskContext task = BarrierTaskContext.get();
        int rank = task.partitionId();
        StoreOptions options = new StoreOptions().token(token);
        String host = hostName();
        try (StoreServer server = rank == 0 ? StoreServer.serve(host, 0, options) : null) {
            String address = server == null ? "" : "tcp://" + host + ":" + server.port();
            String uri = task.allGather(address)[0];
            try (Store store = Store.open(uri, options);
                    Comm comm = Comm.create(store, rank, RANKS)) {
                float[] mine = new float[100_003];
                Arrays.fill(mine, rank + 1);
                Tensor sums = Tensor.copyOf(mine);
                comm.allReduce(sums, ReduceOp.SUM);
                comm.finish();
                task.barrier(); // the server goes last
                FloatBuffer found = sums.floats();
                return "rank " + rank + " on " + host + ": " + found.get(0) + " " + found.get(100_002);
            }
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
