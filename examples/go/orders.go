// Publish orders with confirms, or consume them with acks. Reconnect when the connection is lost.
//
//	go mod init orders && go get github.com/rabbitmq/amqp091-go
//	go run orders.go publish 10
//	go run orders.go consume
//
// With Debian's golang-github-rabbitmq-amqp091-go-dev, in place of the first line:
//
//	export GO111MODULE=off GOPATH=/usr/share/gocode
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strconv"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"
)

const (
	queue = "orders"
	retry = time.Second
)

var errRefused = errors.New("the broker refused the message")

// To repeat what has one of these codes does not help.
var final = map[int]bool{
	amqp.AccessRefused: true, amqp.NotFound: true, amqp.PreconditionFailed: true,
	amqp.NotAllowed: true,
}

func main() {
	if len(os.Args) > 2 && os.Args[1] == "publish" {
		count, _ := strconv.Atoi(os.Args[2])
		for number := 0; number < count; {
			again("publishing", publish(&number, count))
		}
		fmt.Println("published", count)
		return
	}
	for {
		again("consuming", consume())
	}
}

func open() (*amqp.Connection, *amqp.Channel, error) {
	url := os.Getenv("AMQP_URL")
	if url == "" {
		url = "amqp://guest:guest@localhost/"
	}
	connection, err := amqp.Dial(url)
	if err != nil {
		return nil, nil, err
	}
	channel, err := connection.Channel()
	if err == nil {
		_, err = channel.QueueDeclare(queue, true, false, false, false, nil)
	}
	if err != nil {
		connection.Close()
	}
	return connection, channel, err
}

// publish publishes until number is count, or until the connection is lost.
func publish(number *int, count int) error {
	connection, channel, err := open()
	if err != nil {
		return err
	}
	defer connection.Close()
	if err := channel.Confirm(false); err != nil {
		return err
	}
	closed := channel.NotifyClose(make(chan *amqp.Error, 1))
	confirms := channel.NotifyPublish(make(chan amqp.Confirmation, 1))
	for ; *number < count; *number++ {
		message := amqp.Publishing{
			DeliveryMode: amqp.Persistent,
			Body:         []byte(fmt.Sprint("order ", *number)),
		}
		ctx := context.Background()
		if err := channel.PublishWithContext(ctx, "", queue, false, false, message); err != nil {
			return err
		}
		if confirm := <-confirms; !confirm.Ack { // also when the channel has been closed
			return reason(closed, errRefused)
		}
	}
	return nil
}

func consume() error {
	connection, channel, err := open()
	if err != nil {
		return err
	}
	defer connection.Close()
	if err := channel.Qos(100, 0, false); err != nil {
		return err
	}
	closed := channel.NotifyClose(make(chan *amqp.Error, 1))
	deliveries, err := channel.Consume(queue, "", false, false, false, false, nil)
	if err != nil {
		return err
	}
	for delivery := range deliveries {
		fmt.Println("got", string(delivery.Body)) // the work; it may be done twice
		if err := delivery.Ack(false); err != nil {
			return err
		}
	}
	return reason(closed, amqp.ErrClosed)
}

// reason returns why the broker closed the channel, or the other error if it did not.
func reason(closed chan *amqp.Error, other error) error {
	select {
	case err := <-closed:
		if err != nil {
			return err
		}
	default:
	}
	return other
}

func again(what string, err error) {
	var said *amqp.Error
	if errors.As(err, &said) && final[said.Code] {
		fmt.Fprintln(os.Stderr, what, "ends:", err)
		os.Exit(1)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, what, "again:", err)
		time.Sleep(retry)
	}
}
