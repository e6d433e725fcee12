import dev.tessera.*;
import java.nio.FloatBuffer;
import java.nio.LongBuffer;
import java.util.List;
import java.util.Locale;

/** How well all ranks together recognise held-out digits, by the library's metrics. */
final class Evaluation {
    final long[] rows; // this rank's part, which it may recognise
    private final Tensor valid; // 0: fills up the last step and is another rank's
    private final List<Integer> digits;
    double accuracy; // after compute; so is this:
    String facts; // what the log tells

    /** The rows are distributed over {@code others}. */
    Evaluation(Comm others, List<Integer> digits) {
        this.digits = digits;
        try (Sampler data = Sampler.of(others, digits.size()).shuffle(false).build()) {
            rows = data.batch(digits.size());
            valid = data.valid();
        }
    }

    /** Of what all ranks of {@code comm} have; null: another rank counts this one's. */
    void compute(Comm comm, float[][] logits) {
        final int classes = Digits.CLASSES;
        try (Metric confusion = Metric.of(Metric.Kind.CONFUSION_MATRIX).classes(classes).build();
                Metric roc = eachAgainstTheRest(Metric.Kind.ROC_CURVE);
                Metric auroc = eachAgainstTheRest(Metric.Kind.AUROC)) {
            if (logits != null) {
                final int n = logits.length;
                final Tensor scores = Tensor.zeros(DType.F32, n, classes);
                final Tensor predictions = Tensor.zeros(DType.I64, n), labels = Tensor.zeros(DType.I64, n);
                final FloatBuffer score = scores.floats();
                final LongBuffer prediction = predictions.longs(), digit = labels.longs();
                for (int i = 0; i < n; ++i) {
                    score.put(logits[i]);
                    prediction.put(Digits.likeliest(logits[i]));
                    digit.put(digits.get((int) rows[i]));
                }
                confusion.update(predictions, labels, null, valid);
                roc.update(scores, labels, null, valid);
                auroc.update(scores, labels, null, valid);
            }
            confusion.compute(comm); // of all ranks' samples, and the same on every rank
            roc.compute(comm);
            final double area = auroc.compute(comm);

            final long[] matrix = confusion.counts("matrix");
            double right = 0, all = 0;
            for (int i = 0; i < matrix.length; ++i) {
                all += matrix[i];
                right += i % (classes + 1) == 0 ? matrix[i] : 0;
            }
            accuracy = right / all;
            final StringBuilder text = new StringBuilder(String.format(Locale.ROOT,
                    "\"accuracy\":%.6f,\"auroc\":%.6f,\"matrix\":[", accuracy, area));
            for (int i = 0; i < matrix.length; ++i) text.append(i == 0 ? "" : ",").append(matrix[i]);
            for (int c = 0; c < 2 * classes; ++c) {
                final String name = (c % 2 == 0 ? "fpr." : "tpr.") + c / 2;
                String separator = "],\"" + name + "\":[";
                for (double rate : roc.array(name)) {
                    text.append(String.format(Locale.ROOT, "%s%.6f", separator, rate));
                    separator = ",";
                }
            }
            facts = text.append("]").toString();
        }
    }

    private static Metric eachAgainstTheRest(Metric.Kind kind) {
        return Metric.of(kind).task(Metric.Task.MULTICLASS).classes(Digits.CLASSES).build();
    }
}
