/* The all-reduce of OpenMPI, timed as netbench times its own: each repetition after a barrier, times of all ranks together.
   The largest size in bytes may be given. */
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>

static int by_value(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

int main(int argc, char **argv) {
    int rank, size;
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    for (size_t bytes = 1024; bytes <= (size_t)(argc > 1 ? atol(argv[1]) : 64l << 20); bytes *= 4) {
        size_t length = bytes / 4;
        int repetitions = bytes <= (256 << 10) ? 500 : bytes <= (4 << 20) ? 50 : 8;
        float *values = malloc(bytes);
        double *times = malloc(sizeof(double) * repetitions), *all = malloc(sizeof(double) * repetitions * size);
        for (int repetition = -2; repetition < repetitions; repetition++) {
            for (size_t i = 0; i < length; i++) values[i] = (float)((i + rank) % 8);
            MPI_Barrier(MPI_COMM_WORLD);
            double start = MPI_Wtime();
            MPI_Allreduce(MPI_IN_PLACE, values, (int)length, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
            if (repetition >= 0) times[repetition] = (MPI_Wtime() - start) * 1e6;
        }
        MPI_Gather(times, repetitions, MPI_DOUBLE, all, repetitions, MPI_DOUBLE, 0, MPI_COMM_WORLD);
        if (rank == 0) {
            size_t total = (size_t)repetitions * size;
            qsort(all, total, sizeof(double), by_value);
            printf("{\"collective\":\"all_reduce\",\"bytes\":%zu,\"min_us\":%.2f,\"median_us\":%.2f,\"p99_us\":%.2f}\n", bytes,
                   all[0], all[total / 2], all[total * 99 / 100]);
        }
        free(values), free(times), free(all);
    }
    /* The train: each all-reduce needs the result of the one before. */
    enum { HIDDEN = 4096, TRAIN = 200 };
    float hidden[HIDDEN];
    double times[20];
    for (int i = 0; i < HIDDEN; i++) hidden[i] = 1;
    for (int repetition = 0; repetition < 20; repetition++) {
        MPI_Barrier(MPI_COMM_WORLD);
        double start = MPI_Wtime();
        for (int step = 0; step < TRAIN; step++) {
            MPI_Allreduce(MPI_IN_PLACE, hidden, HIDDEN, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
            for (int i = 0; i < HIDDEN; i++) hidden[i] /= (float)size;
        }
        times[repetition] = (MPI_Wtime() - start) * 1e6 / TRAIN;
    }
    if (rank == 0) {
        qsort(times, 20, sizeof(double), by_value);
        printf("{\"collective\":\"all_reduce train\",\"bytes\":%zu,\"min_us\":%.2f,\"median_us\":%.2f,\"p99_us\":%.2f}\n",
               sizeof hidden, times[0], times[10], times[19]);
    }
    MPI_Finalize();
    return 0;
}
